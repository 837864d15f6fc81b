"""Open checkpoints: names, lazy tensors, and tensors that are not supported, an error only if they are needed."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import sluice
from support.command_line import printed

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),  # announced as a prototype
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),  # deprecated, as is the next one
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Tagged(torch.Tensor):
    """A tensor subclass."""


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided)


def packed() -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)


#: A tensor of each kind, by the description of the kind.
KINDS: Mapping[str, Callable[[], torch.Tensor]] = {
    "a nested tensor": nested,
    "a tensor subclass": lambda: torch.eye(3).as_subclass(Tagged),
    "a tensor on the meta device": lambda: torch.empty(3, device="meta"),
    "elements smaller than a byte": packed,
}


def state(odd: torch.Tensor) -> dict[str, Any]:
    return {"weight": torch.arange(6.0).view(2, 3), "odd": odd, "bias": torch.arange(2.0)}


def saved(path: Path, value: object, *, legacy: bool = False) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_others_are_read(tmp_path: Path, kind: str, legacy: bool) -> None:
    value = state(KINDS[kind]())
    with sluice.open(saved(tmp_path / "x.pt", value, legacy=legacy)) as checkpoint:
        assert list(checkpoint) == ["weight", "bias"]
        assert torch.equal(checkpoint["bias"].read(), value["bias"])
        assert "odd" not in checkpoint
        leaf = checkpoint.tree["odd"]
        assert isinstance(leaf, sluice.UnsupportedValue)
        assert kind in leaf.reason
        for ask in (
            lambda: checkpoint["odd"],
            lambda: checkpoint.get("odd"),
            lambda: sluice.open(checkpoint, key="odd"),
            lambda: sluice.load_state_dict(checkpoint),
        ):
            with pytest.raises(sluice.UnsupportedError, match=kind) as caught:
                ask()
            assert (caught.value.tensor, caught.value.found) == ("odd", leaf.qualified_name)
            assert caught.value.file == str(tmp_path / "x.pt")
        with pytest.raises(KeyError):
            checkpoint["nothing"]


def test_a_part_without_it_is_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"model": {"w": torch.ones(3)}, "extra": {"odd": nested()}})
    assert list(sluice.load_state_dict(path)) == ["w"]
    with pytest.raises(sluice.UnsupportedError, match="nested"):
        sluice.load_state_dict(path, key="extra")


def test_a_module_that_needs_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"module.weight": nested(), "module.bias": torch.arange(2.0)})
    for strict in (True, False):
        model = torch.nn.Linear(3, 2)
        before = model.bias.detach().clone()
        with pytest.raises(sluice.UnsupportedError, match="nested") as caught:
            sluice.load_into(model, path, strict=strict)
        assert caught.value.tensor == "module.weight"
        assert torch.equal(model.bias, before)
    other = saved(tmp_path / "y.pt", {"old": nested(), "bias": torch.arange(2.0)})
    with pytest.raises(sluice.UnsupportedError, match="nested"):  # also needed under its new name
        sluice.load_into(torch.nn.Linear(3, 2), other, rename={"old": "weight"}, strict=False)


def test_a_module_that_does_not_need_it(tmp_path: Path) -> None:
    value = state(nested())
    path = saved(tmp_path / "x.pt", value)
    model = torch.nn.Linear(3, 2)
    with pytest.raises(sluice.UnsupportedError, match="nested"):  # strict: the module has no tensor of this name
        sluice.load_into(model, path)
    sluice.load_into(model, path, strict=False)
    assert torch.equal(model.weight, value["weight"])


def test_what_is_made_of_it(tmp_path: Path) -> None:
    value = {"p": torch.nn.Parameter(torch.eye(2).as_subclass(Tagged)), "w": torch.ones(2)}
    with sluice.open(saved(tmp_path / "x.pt", value)) as checkpoint:
        assert list(checkpoint) == ["w"]
        assert isinstance(checkpoint.tree["p"], sluice.UnsupportedValue)


def test_a_file_of_nothing_else(tmp_path: Path) -> None:
    with sluice.open(saved(tmp_path / "x.pt", nested())) as checkpoint:
        assert len(checkpoint) == 0
        with pytest.raises(sluice.UnsupportedError, match="nested"):
            checkpoint[""]


def test_one_file_for_each_parameter(tmp_path: Path) -> None:
    saved(tmp_path / "a.pt", torch.ones(2))
    saved(tmp_path / "b.pt", nested())
    with sluice.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["a"]
        with pytest.raises(sluice.UnsupportedError, match="nested") as caught:
            checkpoint["b"]
    assert caught.value.file == str(tmp_path / "b.pt")


def test_shards_and_their_total_size(tmp_path: Path) -> None:
    saved(tmp_path / "pytorch_model-1.bin", {"a": torch.ones(2), "odd": nested()})
    saved(tmp_path / "pytorch_model-2.bin", {"b": torch.ones(2)})
    places = {"a": "pytorch_model-1.bin", "odd": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    index = {"metadata": {"total_size": 24}, "weight_map": places}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with sluice.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["a", "b"]
        assert not checkpoint.index.notes
        assert isinstance(checkpoint.tree["odd"], sluice.UnsupportedValue)


def test_inspect_lists_it(tmp_path: Path) -> None:
    value = {**state(nested()), "turned": torch.ones(2, dtype=torch.complex64).conj()}
    path = str(saved(tmp_path / "x.pt", value))
    shown = printed("inspect", path)
    assert re.search(r"odd +a nested tensor +torch\._utils\._rebuild_nested_tensor", shown)
    assert "contents" not in shown  # all other values at the top are tensors
    assert re.search(r"turned +conj complex64 ", shown)
    tree = printed("inspect", path, "--tree")
    assert "odd: a nested tensor, torch._utils._rebuild_nested_tensor (not loaded)" in tree
    described = json.loads(printed("inspect", path, "--json"))
    assert described["unsupported"] == [
        {"name": "odd", "reason": "a nested tensor", "found": "torch._utils._rebuild_nested_tensor", "file": path}
    ]
    assert described["values"] == []
    assert [tensor["math_bits"] for tensor in described["tensors"]] == [[], [], ["conj"]]


def test_too_many(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", [torch.empty(3, device="meta") for _ in range(20)])
    with pytest.raises(sluice.LimitError, match="10 unsupported values"):
        sluice.open(path, limits=sluice.Limits(entries=10))


@pytest.fixture(params=["f.pth", "f.safetensors"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / str(request.param)
    tensors = {"a.w": torch.arange(60.0).reshape(12, 5), "a.b": torch.arange(12), "c": torch.ones(3).half()}
    if path.suffix == ".pth":
        torch.save(tensors, path)
    else:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_a_checkpoint_is_a_mapping_of_lazy_tensors(file: Path) -> None:
    with sluice.open(file) as checkpoint:
        assert set(checkpoint) == {"a.w", "a.b", "c"}
        assert len(checkpoint) == 3
        assert checkpoint.format == {"f.pth": "torch-zip", "f.safetensors": "safetensors"}[file.name]
        assert checkpoint.files == (str(file),)
        assert checkpoint.nbytes == 240 + 96 + 6
        tensor = checkpoint["a.w"]
        assert (tensor.name, tensor.dtype, tensor.shape, tensor.stride()) == ("a.w", torch.float32, (12, 5), (5, 1))
        assert tensor.nbytes == 240
        assert repr(tensor) == "LazyTensor('a.w', dtype=float32, shape=(12, 5))"
        assert tensor.storage_key != checkpoint["c"].storage_key
        assert "nope" not in checkpoint


def test_a_tensor_reads_into_memory_that_exists(file: Path) -> None:
    with sluice.open(file) as checkpoint:
        out = torch.zeros(5, 12, dtype=torch.float64).t()
        assert checkpoint["a.w"].read(out=out).data_ptr() == out.data_ptr()
        assert torch.equal(out, torch.arange(60.0).reshape(12, 5).double())
        with pytest.raises(sluice.MismatchError, match=r"out has another shape; expected \(12, 5\); found \(3,\)"):
            checkpoint["a.w"].read(out=torch.zeros(3))
        with pytest.raises(ValueError, match="out decides"):
            checkpoint["a.w"].read(out=out, dtype=torch.float32)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(1, dtype=torch.complex64).expand(2),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.complex64, device="meta"),
        torch.nn.UninitializedParameter(),
    ],
    ids=["conjugated", "expanded", "real", "meta", "lazy"],
)
def test_memory_that_cannot_hold_the_values_is_refused(out: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"c": torch.tensor([1 + 2j, 3 - 1j])}, tmp_path / "c.pth")
    with sluice.open(tmp_path / "c.pth") as checkpoint, pytest.raises(sluice.MismatchError, match="out ") as caught:
        checkpoint["c"].read(out=out)
    assert caught.value.file == str(tmp_path / "c.pth")


def test_autograd_learns_of_a_read_into_a_tensor(file: Path) -> None:
    weight, x = torch.nn.Parameter(torch.zeros(12, 5)), torch.ones(12, 5, requires_grad=True)
    product = (weight * x).sum()
    with sluice.open(file) as checkpoint, torch.no_grad():
        checkpoint["a.w"].read(out=weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()  # type: ignore[no-untyped-call]


def test_a_checkpoint_stays_open_when_one_that_it_lent_its_files_to_is_closed(file: Path) -> None:
    with sluice.open(file) as checkpoint:
        with sluice.open(checkpoint) as same, sluice.open(checkpoint, key="a") as part:
            assert (set(same), set(part)) == (set(checkpoint), {"w", "b"})
            checkpoint["c"].read()
        with pytest.raises(ValueError, match="closed"):
            part["b"].read()
        lent = sluice.open(checkpoint)
        checkpoint["c"].read()
    with pytest.raises(ValueError, match="closed"):
        lent["c"].read()


@pytest.mark.parametrize(
    "call",
    [
        lambda file: sluice.open(file, key="z"),
        lambda file: sluice.load_into(torch.nn.Linear(2, 2), file),
        lambda file: sluice.load_state_dict(file, key="z"),
        lambda file: sluice.convert(file, file.with_name("other.pth"), rename={"z": "y"}),
        lambda file: sluice.diff(file, file, key="z"),
    ],
    ids=["open", "load_into", "load_state_dict", "convert", "diff"],
)
def test_what_does_not_fit_names_the_file(file: Path, call: Callable[[Path], object]) -> None:
    with pytest.raises(sluice.MismatchError) as caught:
        call(file)
    assert caught.value.file == str(file)


def test_a_key_shows_a_part(file: Path) -> None:
    with sluice.open(file, key="a") as checkpoint:
        assert set(checkpoint) == {"w", "b"}
    with sluice.open(file) as checkpoint, sluice.open(checkpoint, key="a") as part:
        assert torch.equal(part["b"].read(), torch.arange(12))


def test_a_closed_checkpoint_reads_nothing_more(file: Path) -> None:
    with sluice.open(file) as checkpoint:
        tensor = checkpoint["c"]
    with pytest.raises(ValueError, match="closed"):
        tensor.read()


def test_the_tree_mirrors_the_file(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(2)}, "steps": [1, torch.zeros(1)], 3: "three"}
    torch.save(saved, tmp_path / "f.pth")
    with sluice.open(tmp_path / "f.pth") as checkpoint:
        tree = checkpoint.tree
        assert list(tree) == ["model", "steps", 3]
        assert torch.equal(tree["model"]["w"].read(), torch.ones(2))
        assert tree["model"]["w"].name == "model.w"
        assert tree["steps"][0] == 1
        assert tree["steps"][1].name == "steps.1"


def test_a_misspelt_name_is_a_key_error_that_names_a_similar_one(file: Path) -> None:
    with sluice.open(file) as checkpoint:
        name = next(iter(checkpoint))
        with pytest.raises(KeyError, match=f"is not in {file}; did you mean {name!r}") as caught:
            checkpoint[f"{name}x"]
        assert caught.value.args == (f"{name}x",)
        assert str(pickle.loads(pickle.dumps(caught.value))) == repr(str(caught.value))
        assert checkpoint.get("zzz") is None
