"""The functions and classes of safetensors.torch: the same bytes, values, names and errors as the library's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch as library
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import sluice
from sluice import safetensors as ours
from sluice.safetensors import SafetensorError, safe_open
from support.trained_net import empty

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]

SHARED = torch.ones(4)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.arange(6).reshape(2, 3).to(dtype) for i, dtype in enumerate(DTYPES)} | {
        "e": torch.empty(2, 0)
    }


@pytest.mark.parametrize("metadata", [None, {"epoch": "3"}, {"format": "pt"}])
def test_files_have_the_bytes_of_the_library(
    tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    library.save_file(tensors, tmp_path / "theirs.safetensors", metadata)
    ours.save_file(tensors, tmp_path / "ours.safetensors", metadata)
    written = (tmp_path / "ours.safetensors").read_bytes()
    assert written == (tmp_path / "theirs.safetensors").read_bytes()
    assert ours.save(tensors, metadata) == written
    for loaded in (ours.load_file(tmp_path / "ours.safetensors"), ours.load(written)):
        expected = library.load_file(tmp_path / "theirs.safetensors")
        assert list(loaded) == list(expected)
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ("notadict", ValueError),
        ({"x": {"some": "thing"}}, ValueError),
        ({"x": torch.eye(2).to_sparse()}, ValueError),
        ({"x": torch.ones(2, 3).t()}, ValueError),
        ({"x": torch.empty(2, device="meta")}, RuntimeError),
        ({"x": SHARED, "y": SHARED[:2]}, RuntimeError),
    ],
    ids=["str", "dict", "sparse", "strided", "meta", "shared"],
)
def test_what_the_library_refuses_to_save_is_refused(tmp_path: Path, bad: Any, kind: type[Exception]) -> None:
    for save in (library.save_file, ours.save_file):
        with pytest.raises(kind):
            save(bad, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("data", [b"", b"\x09" + b"\0" * 7 + b"not json!", b"\xff" * 40])
def test_errors_about_a_file_are_those_of_both_libraries(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(safetensors.SafetensorError) as caught:
        ours.load_file(path)
    assert isinstance(caught.value, sluice.CheckpointError)
    with pytest.raises(FileNotFoundError):
        ours.load_file(tmp_path / "missing.safetensors")
    for again in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))
    torch.save({"w": torch.ones(1)}, tmp_path / "m.pth")
    with pytest.raises(ours.SafetensorError, match="not a safetensors file: torch-zip"):
        ours.load_file(tmp_path / "m.pth")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = self.a
        self.c = nn.Linear(3, 3)
        self.c.weight = nn.Parameter(torch.rand(3, 3).t())


def outcome(load: Callable[..., Any], model: nn.Module, path: Path, *, strict: bool) -> tuple[Any, ...]:
    model = copy.deepcopy(model)
    try:
        missing, unexpected = load(model, path, strict=strict)
    except RuntimeError as error:
        return (str(error),)  # the library has changed the model by now
    return missing, sorted(unexpected), {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("change", ["none", "other name", "missing", "unexpected", "both names", "declared"])
def test_models_are_saved_and_filled_as_by_the_library(tmp_path: Path, change: str, *, strict: bool) -> None:
    saved, model, path = Tied(), Tied(), tmp_path / "m.safetensors"
    ours.save_model(saved, path)
    library.save_model(saved, str(tmp_path / "theirs.safetensors"))
    with ours.safe_open(path, "pt") as file:
        assert file.metadata() == {"b.bias": "a.bias", "b.weight": "a.weight"}
    state = library.load_file(path)
    assert state.keys() == library.load_file(tmp_path / "theirs.safetensors").keys()
    if change == "other name":
        state["b.weight"] = state.pop("a.weight")
    elif change == "missing":
        del state["c.bias"]
    elif change == "unexpected":
        state["z"] = torch.ones(1)
    elif change == "both names":
        state["b.weight"] = state["a.weight"].clone()
    library.save_file(state, path)
    if change == "declared":  # by a file of sluice, with both names
        sluice.save(saved, path, overwrite=True)
    before = copy.deepcopy(model.state_dict())
    expected = outcome(library.load_model, model, path, strict=strict)
    if len(expected) == 3 and not expected[0]:
        assert outcome(ours.load_model, empty(Tied), path, strict=strict) == expected
    assert outcome(ours.load_model, model, path, strict=strict) == expected
    if len(expected) == 1:
        with pytest.raises(RuntimeError):
            ours.load_model(model, path)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_names_that_a_model_does_not_use_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    library.save_file({**nn.Linear(3, 3).state_dict(), **{name: torch.ones(1) for name in "pqrs"}}, path)
    assert ours.load_model(nn.Linear(3, 3), path, strict=False) == (set(), list("pqrs"))


@pytest.mark.parametrize("strict", [True, False])
def test_load_hooks_and_versions_of_a_model_are_followed(tmp_path: Path, *, strict: bool) -> None:
    model, path = nn.Sequential(nn.BatchNorm1d(3), weight_norm(nn.Linear(3, 3))), tmp_path / "old.safetensors"
    state = {f"0.{name}": torch.rand(3) for name in ("weight", "bias", "running_mean", "running_var")}
    state |= {"1.bias": torch.rand(3), "1.weight_g": torch.rand(3, 1), "1.weight_v": torch.rand(3, 3)}
    library.save_file(state, path)
    expected = outcome(library.load_model, model, path, strict=strict)
    assert (len(expected), outcome(ours.load_model, model, path, strict=strict)) == (3, expected)


def test_strided_weights_are_saved_without_copies_unless_the_caller_wants_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="force_contiguous=True"):
        ours.save_model(Tied(), tmp_path / "m.safetensors", force_contiguous=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("open") / "m.safetensors"
    library.save_file({"w": torch.arange(20.0).reshape(4, 5), "b": torch.ones(3, dtype=torch.int64)}, path, {"k": "v"})
    return path


def test_names_metadata_and_tensors(path: Path) -> None:
    with safetensors.safe_open(path, "pt") as theirs, safe_open(path, "pt") as ours:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        assert {name: t.tolist() for name, t in ours.get_tensors().items()} == {
            name: theirs.get_tensor(name).tolist() for name in theirs.offset_keys()
        }
        with pytest.raises(SafetensorError, match="does not contain tensor nope"):
            ours.get_tensor("nope")
    with safe_open(path, framework="np") as arrays:
        assert arrays.get_tensor("w").sum() == 190
    with pytest.raises(SafetensorError, match="not open"):
        ours.keys()


@pytest.mark.parametrize("arguments", [{"framework": "tf"}, {"framework": "pt", "backend": "nope"}])
def test_what_only_the_library_does_is_refused(path: Path, arguments: dict[str, str]) -> None:
    with pytest.raises(SafetensorError):
        safe_open(path, **arguments)


INDEX = st.one_of(st.integers(-7, 7), st.slices(5).filter(lambda key: (key.step or 1) == 1))


@given(keys=st.lists(INDEX, max_size=2).map(tuple))
def test_slices_are_those_of_the_library(path: Path, keys: tuple[Any, ...]) -> None:
    with safetensors.safe_open(path, "pt") as theirs, safe_open(path, "pt") as ours:
        their_slice, our_slice = theirs.get_slice("w"), ours.get_slice("w")
        assert our_slice.get_shape() == their_slice.get_shape()
        assert our_slice.get_dtype() == their_slice.get_dtype()
        try:
            expected = their_slice[keys]
        except (SafetensorError, IndexError) as error:
            with pytest.raises(type(error)):
                our_slice[keys]
        else:
            assert torch.equal(our_slice[keys], expected)


def test_an_empty_list_and_steps(path: Path) -> None:
    with safe_open(path, "pt") as file:
        assert file.get_slice("w")[[]].shape == (0, 5)
        assert file.get_slice("w")[::2, 1].tolist() == [1.0, 11.0]
        with pytest.raises(SafetensorError, match="Non empty lists"):
            file.get_slice("w")[[0, 1]]
