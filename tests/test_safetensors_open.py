"""safe_open: names, order, metadata, tensors and slices as in the class of safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch as library
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.safetensors import SafetensorError, safe_open


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
