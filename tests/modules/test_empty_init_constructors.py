"""Constructors that move, cast, copy, initialise or read their parameters, under ``empty_init``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

import sluice
from sluice.loading import module_job
from sluice.modules import emptied
from sluice.modules.emptied import moved_to
from support.oracles import bits
from support.trained_net import empty, load


class Moved(nn.Module):
    """Moves and casts itself, its layers and its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(3, 4).half()
        self.norm = nn.BatchNorm1d(4).bfloat16().to("cpu")
        self.large = nn.Linear(4, 4).to(torch.device("cpu"), torch.float64, non_blocking=True)
        self.back = nn.Linear(4, 4).double().float()
        self.image = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.like = nn.Linear(2, 2).to(self.large.weight)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.to("cpu")


class Copied(nn.Module):
    """Deep copies, also of buffers, and torch's own clones."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])
        self.transformer = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
        self.teacher = copy.deepcopy(layer).requires_grad_(False)
        self.weight = nn.Parameter(layer.get_parameter("0.weight").data.clone())
        self.register_buffer("color", nn.Parameter(torch.ones(3)))
        self.register_buffer("frozen", torch.ones(3))  # as DETR freezes a norm
        with torch.no_grad():
            assert self.get_buffer("frozen").copy_(layer.get_parameter("1.weight")).mul(2).shape == (3,)


class Initialised(nn.Module):
    """Every way to initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, padding_idx=0)
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.embedding.weight[0].fill_(0)
            self.embedding.weight[1] = torch.arange(4.0)
            self.linear.weight.copy_(torch.eye(4))
            self.linear.weight.mul_(torch.full((4,), 2.0)).add_(1)
            self.linear.bias.data.uniform_(-0.1, 0.1)
            self.linear.bias[torch.tensor([True, False, True, False])] = 0
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.eye_(self.linear.weight)
        nn.init.dirac_(nn.Conv1d(2, 2, 3).weight)
        self.linear.weight.data = torch.randn(4, 4)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


class Asking(nn.Module):
    """Asks for devices, dtypes, shapes and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        weight = self.linear.weight
        assert weight.device == torch.device("cpu")
        assert weight.dtype == torch.float32
        self.register_buffer("mask", torch.ones(4, 4, device=weight.device).tril(), persistent=False)
        self.register_buffer("norm", weight.norm(dim=1).detach())
        self.plain = torch.full((2, 2), 7).triu().view(4)
        computed = torch.ones(3) * 2
        self.first, self.second = nn.Parameter(computed), nn.Parameter(computed)
        assert self.first.data_ptr() == self.second.data_ptr() != weight.data_ptr()
        with torch.no_grad():
            self.width = self.linear(torch.zeros(2, 4)).shape[1]


class Masked(nn.Module):
    """Masks of each kind: saved, computed, shared by two modules, a view of a mask, in half precision; a rotation."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(16, dtype=torch.float64), torch.arange(4.0).double())
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles), persistent=False)
        mask = torch.full((6, 6), float("-inf")).triu(1)
        self.register_buffer("computed", mask, persistent=False)
        self.register_buffer("part", mask[:3, :3], persistent=False)
        self.register_buffer("saved", mask.clone())
        self.register_buffer("small", mask.bfloat16(), persistent=False)
        self.other = nn.Linear(2, 2)
        self.other.register_buffer("shared", mask, persistent=False)
        self.other.late = nn.Buffer(torch.ones(2, 2, dtype=cast("Any", bool)).tril(), persistent=False)  # as Bark does


class Late(nn.Module):
    """Recomputes its buffer in ``reset_parameters`` from values that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("slopes", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.get_buffer("slopes").copy_(torch.tensor([2.0**-i for i in range(4)]))


BUILDS: list[Callable[[], nn.Module]] = [Moved, Copied, Initialised, Asking, Masked, Late]


def describe(module: nn.Module) -> object:
    tensors = module.state_dict(keep_vars=True)
    storages = [t.untyped_storage()._cdata for t in tensors.values()]
    objects = list(map(id, tensors.values()))
    return [
        (name, t.shape, t.stride(), t.dtype, type(t), t.requires_grad, objects.index(id(t)), storages.index(storage))
        for (name, t), storage in zip(tensors.items(), storages, strict=True)
    ]


@pytest.mark.parametrize("build", BUILDS)
def test_constructors_build_the_same_module_and_the_checkpoint_fills_it(build: Callable[[], nn.Module]) -> None:
    expected = build()
    before = torch.get_rng_state()
    model = empty(build)
    assert all(t.is_meta for t in model.parameters())
    assert describe(model) == describe(expected)
    assert build is Initialised or torch.equal(torch.get_rng_state(), before)
    load(model, expected.state_dict())
    assert describe(model) == describe(expected)
    for name, tensor in expected.state_dict().items():
        assert bits(model.state_dict()[name]) == bits(tensor), name  # some are uninitialized: NaN is not equal to NaN
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(model, name), value)


class Reader(nn.Module):
    """Calls a function with its parameter, a line below."""

    def __init__(self, read: Callable[[Any], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        read(self.weight)


def stale(weight: torch.Tensor) -> object:
    """Compute with the tensor of which a parameter was made, after the parameter was initialised."""
    made = torch.zeros(3)
    nn.init.ones_(nn.ParameterList([nn.Parameter(made)])[0])
    return made * weight.shape[0]


def stale_buffer(weight: torch.Tensor) -> object:
    """Compute with the tensor of a buffer that got values of a parameter."""
    made = nn.BatchNorm1d(4).get_buffer("running_mean")
    return made.copy_(weight.detach()), made + 1


READS: dict[str, Callable[[Any], object]] = {
    "item": lambda weight: weight.mean().item(),
    "float": lambda weight: float(weight[0]),
    "bool": lambda weight: bool((weight == 1).all()),
    "tolist": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.detach().numpy(),
    "format": lambda weight: f"{weight[0]:.2f}",
    "in": lambda weight: 1 in weight,
    "equal": lambda weight: torch.equal(weight, torch.ones(4)),
    "allclose": lambda weight: torch.allclose(torch.ones(4), weight),
    "nonzero": lambda weight: weight.nonzero(),
    "copy_": lambda weight: torch.zeros(4).copy_(weight),
    "scalar add_": lambda weight: torch.tensor(2.0).add_(weight.detach().sum()),
    "out=": lambda weight: torch.add(weight.detach().sum(), 1, out=torch.tensor(2.0)),
    "__setitem__": lambda weight: torch.arange(3.0).__setitem__(1, weight.detach().sum()),
    "fill_": lambda weight: torch.arange(3.0).fill_(weight.detach().sum()),
    "running statistics": lambda weight: nn.BatchNorm1d(4)(weight.view(1, 4).expand(2, 4)),
    "stale": stale,
    "stale buffer": stale_buffer,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_are_refused_with_the_line_of_the_constructor(read: Callable[[Any], object]) -> None:
    with (
        sluice.empty_init(),
        pytest.raises(sluice.EmptyInitError, match=rf"{Path(__file__).name}:\d+\) needs the values .* outside"),
    ):
        Reader(read)


def test_numbers_are_never_computed_from_a_mix_of_real_tensors_and_parameters() -> None:
    with sluice.empty_init():
        layer = nn.Linear(4, 3, bias=False)
        assert layer(torch.ones(2, 4)).is_meta  # torch itself returns what is in the memory
        assert nn.functional.conv1d(torch.ones(1, 4, 8), nn.Conv1d(4, 3, 3).weight).is_meta


def test_errors_of_the_constructor_are_its_own() -> None:
    with sluice.empty_init(), pytest.raises(RuntimeError, match="must have same reduction dim") as caught:
        Reader(lambda weight: weight.view(2, 2) @ torch.ones(3, 4))
    assert not isinstance(caught.value, sluice.EmptyInitError)


def test_moves_are_remembered_and_followed_by_a_load(tmp_path: Path) -> None:
    class OnDevice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
            self.head.cuda().half()
            self.norm = nn.LayerNorm(3).to("cuda:1")
            assert self.head.weight.device.type == "cuda"
            assert self.norm.weight.device == torch.device("cuda:1")

    with sluice.empty_init():
        model = OnDevice()
    assert str(moved_to(model.head.weight)) == f"cuda:{torch.cuda.current_device() if torch.cuda.is_available() else 0}"
    assert moved_to(model.body.weight) is None
    if torch.cuda.is_available():
        return
    torch.save({name: torch.ones(t.shape, dtype=t.dtype) for name, t in model.state_dict().items()}, tmp_path / "f.pth")
    plan = sluice.plan(model, tmp_path / "f.pth")
    report = sluice.load_into(model, tmp_path / "f.pth")
    assert model.head.weight.dtype == torch.float16
    assert all(t.device.type == "cpu" for t in model.state_dict().values())
    for notes in (plan.notes, report.notes):
        assert any("moved 2 tensors to cuda:0" in note and "not available" in note for note in notes)


def test_initialised_tensors_are_planned_where_the_constructor_moved_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with sluice.empty_init():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).cuda()
    planned = mock.Mock(side_effect=ZeroDivisionError)  # after it: this machine may not have the device
    monkeypatch.setattr(emptied, "_is_available", lambda _: True)
    monkeypatch.setattr(module_job, "plan_transfer", planned)
    with pytest.raises(ZeroDivisionError):
        load(model, {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, strict=False)
    assert [torch.device(each.device).type for each in planned.call_args.kwargs["computed"]] == ["cuda", "cuda"]
