"""Loads that quantize: the bits of a model that was loaded first and quantized then."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import sluice
from sluice._errors import BudgetError, ReadError
from sluice.quantizing.inner_tensors import inner_tensors
from sluice.quantizing.weights import quantizing_threads
from support.hf_comparing import assert_same_weights
from support.quantized import CONFIGS, Scaled, scale_modules
from support.sources import RecordingSource
from support.trained_net import empty

WIDTH = 1024
IDS = torch.tensor([[1, 2, 3]])


class Net(nn.Module):
    """An embedding, two linear layers, of which the first is cut into pieces, and a norm."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.wide = nn.Linear(WIDTH, 2500)
        self.norm = nn.LayerNorm(2500)
        self.narrow = nn.Linear(2500, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.narrow(self.norm(self.wide(self.words(ids))))
        result: torch.Tensor = self.head(x)
        return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    torch.manual_seed(0)
    model = Net()
    path = tmp_path_factory.mktemp("quantizing") / "net.pth"
    torch.save(model.state_dict(), path)
    return model, path


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("by_row", [True, False])
def test_the_result_is_that_of_quantizing_the_loaded_model(
    trained: tuple[Net, Path], dtype: torch.dtype | None, *, by_row: bool
) -> None:
    model, path = trained
    expected = copy.deepcopy(model)
    sluice.load_into(expected, path, dtype=dtype)
    scale_modules(by_row=by_row)(expected)
    found = empty(Net)
    threads = torch.get_num_threads()
    report = sluice.load_into(found, path, dtype=dtype, quantize=scale_modules(by_row=by_row))
    assert torch.get_num_threads() == threads
    assert_same_weights(found, expected)
    with torch.no_grad():
        assert torch.equal(found(IDS), expected(IDS))
    assert found.wide.extra_repr() == "scaled"
    assert str(found) == str(expected)
    (note,) = [note for note in report.notes if "quantized" in note]
    assert ("pieces of rows" in note) == by_row
    assert report.loaded_bytes == sum(part.nbytes for each in found.parameters() for part in inner_tensors(each.data))


def test_pieces_are_smaller_than_a_large_weight(trained: tuple[Net, Path]) -> None:
    _, path = trained
    largest: list[int] = []

    def watched(root: nn.Module) -> None:
        largest.extend(
            len(part.weight) for part in root.modules() if isinstance(part, nn.Linear) and not part.weight.is_meta
        )
        scale_modules(names=lambda name: name != "head")(root)

    sluice.load_into(empty(Net), path, quantize=watched)
    assert 32 <= max(largest) <= 256  # rows of 4 KiB in a piece of 1 MiB, or less with more than four cores
    assert sum(largest) >= 2500 + WIDTH


def test_a_plan_knows_the_finished_size_before_anything_is_read(trained: tuple[Net, Path]) -> None:
    _, path = trained
    quantize = scale_modules()
    plain, planned = sluice.plan(empty(Net), path), sluice.plan(empty(Net), path, quantize=quantize)
    found = empty(Net)
    report = sluice.load_into(found, path, quantize=quantize)
    assert planned.final_bytes == report.final_bytes < plain.final_bytes / 3
    with pytest.raises(BudgetError):
        sluice.load_into(empty(Net), path, quantize=quantize, memory="8MiB")


def test_a_failed_read_leaves_the_model_empty(trained: tuple[Net, Path]) -> None:
    _, path = trained
    model = empty(Net)
    with sluice.open(path) as checkpoint:
        files = checkpoint.open_files
        faulty = RecordingSource(files[0].source, fails_at=5)
        checkpoint.open_files = (replace(files[0], source=faulty),)
        with pytest.raises(ReadError):
            sluice.load_into(model, checkpoint, quantize=scale_modules())
        checkpoint.open_files = files
    assert all(parameter.is_meta for parameter in model.parameters())
    assert threading.active_count() == 1


@pytest.mark.parametrize(
    ("quantize", "error", "reason"),
    [
        (lambda root: root.wide.half(), ValueError, "casts weights in place"),
        (lambda root: root.add_module("wide", nn.Identity()), ValueError, "replaces or adds the module 'wide'"),
        (lambda root: root.wide.add_module("in", nn.Identity()), ValueError, "replaces or adds the module 'wide.in'"),
        (lambda root: setattr(root.wide, "__class__", nn.Bilinear), ValueError, "replaces or adds the module 'wide'"),
        (lambda root: root.wide._parameters.update(weight=None, bias=None), ValueError, r"\['weight', 'bias'\]"),
        (lambda root: root.wide.register_buffer("scale", torch.ones(1)), ValueError, r"changes \['scale'\]"),
        (lambda root: root.wide.weight.max().item(), ValueError, "tensors without data"),
        ("int8", TypeError, "a configuration of torchao"),
    ],
)
def test_what_cannot_be_quantized_while_loading_is_refused(
    trained: tuple[Net, Path], quantize: object, error: type[Exception], reason: str
) -> None:
    _, path = trained
    model = empty(Net)
    with pytest.raises(error, match=reason):
        sluice.load_into(model, path, quantize=quantize)
    assert model.wide.weight.is_meta


@pytest.mark.parametrize("names", ["both", "embedding", "head"])
def test_a_tied_head_is_untied_as_quantizing_a_loaded_model_does(tmp_path: Path, names: str) -> None:
    torch.manual_seed(0)
    expected = Net(tied=True)
    state = expected.state_dict()
    kept = {"both": {}, "embedding": {"head.weight"}, "head": {"words.weight"}}[names]
    torch.save({name: value for name, value in state.items() if name not in kept}, tmp_path / "f.pth")
    scale_modules()(expected)
    found = empty(functools.partial(Net, tied=True))
    report = sluice.load_into(found, tmp_path / "f.pth", quantize=scale_modules())
    assert_same_weights(found, expected)
    assert type(found.words.weight) is nn.Parameter
    assert isinstance(found.head.weight.data, Scaled)
    assert "'head.weight' is not tied any more: it is quantized" in str(report)
    assert report.tied == ()


def test_two_loads_at_once_give_torch_its_threads_back(trained: tuple[Net, Path]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ExitStack() as last, quantizing_threads(1):
            last.enter_context(quantizing_threads(1))  # ends after the other one
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_tied_head_that_is_left_out_stays_tied(trained: tuple[Net, Path]) -> None:
    _, path = trained
    model = empty(functools.partial(Net, tied=True))
    report = sluice.load_into(model, path, strict=False, quantize=scale_modules(names=lambda name: name != "head"))
    assert model.head.weight is model.words.weight
    assert report.tied == (("words.weight", "head.weight"),)


def test_live_models_are_refused(trained: tuple[Net, Path]) -> None:
    model, path = trained
    with pytest.raises(ValueError, match="has memory already"):
        sluice.load_into(copy.deepcopy(model), path, quantize=scale_modules())


@pytest.fixture(scope="module")
def torchao() -> Any:
    with warnings.catch_warnings(action="ignore"):
        return pytest.importorskip("torchao.quantization", reason="torchao is not installed")


_CONFIGS: dict[str, Callable[[Any], object]] = {
    **CONFIGS,
    "int4-groups": lambda torchao: torchao.IntxWeightOnlyConfig(
        weight_dtype=vars(torch)["int4"], granularity=torchao.PerGroup(4)
    ),
    "by-name": lambda torchao: torchao.FqnToConfig(
        {"wide": torchao.Int8WeightOnlyConfig(), "head": torchao.Float8WeightOnlyConfig()}
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", _CONFIGS)
def test_configurations_of_torchao(trained: tuple[Net, Path], torchao: Any, config: str) -> None:
    model, path = trained
    chosen: Any = _CONFIGS[config](torchao)
    expected = copy.deepcopy(model)
    named = {"filter_fn": None} if config == "by-name" else {}
    torchao.quantize_(expected, chosen, **named)
    found = empty(Net)
    sluice.load_into(found, path, quantize=chosen)
    assert_same_weights(found, expected)
    with torch.no_grad():
        assert torch.equal(found(IDS), expected(IDS))
    assert str(found) == str(expected)


@pytest.mark.filterwarnings("ignore")
def test_a_filter_of_torchao(trained: tuple[Net, Path], torchao: Any) -> None:
    _, path = trained
    found = empty(functools.partial(Net, tied=True))
    quantize = functools.partial(
        torchao.quantize_, config=torchao.Int8WeightOnlyConfig(), filter_fn=lambda _, name: name == "wide"
    )
    sluice.load_into(found, path, strict=False, quantize=quantize)
    assert [name for name, value in found.named_parameters() if hasattr(value, "qdata")] == ["wide.weight"]


def test_a_tied_weight_that_becomes_a_plain_one_is_a_parameter_of_its_own(tmp_path: Path) -> None:
    def make() -> Net:
        model = Net(tied=True)
        model.head.add_module("inner", nn.Linear(8, 8))
        return model

    def quantize(root: nn.Module) -> None:
        for module in root.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                assert len(module.weight) in {2500, WIDTH, 64, 8}, "not for other numbers of rows"
                dtype = torch.float8_e4m3fn if isinstance(module, nn.Linear) else torch.int8
                module.weight = nn.Parameter(module.weight.to(dtype), requires_grad=False)

    model, found = make(), empty(make)
    torch.save(model.state_dict(), tmp_path / "f.pth")
    sluice.plan(found, tmp_path / "f.pth", quantize=quantize)
    assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}
    with torch.device("meta"):  # the default device of torch
        sluice.load_into(found, tmp_path / "f.pth", quantize=quantize)
    assert torch.equal(found.words.weight, model.words.weight)
    assert torch.equal(found.norm.weight, model.norm.weight.to(torch.int8))
    assert torch.equal(found.head.weight.view(torch.int8), model.head.weight.to(torch.float8_e4m3fn).view(torch.int8))
