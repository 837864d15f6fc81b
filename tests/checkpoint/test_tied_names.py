"""Tied names that the files of a checkpoint declare together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sluice
from sluice import FormatError, LimitError, Limits
from sluice.formats.safetensors.header import declare_ties
from support.directories import SAFETENSORS_INDEX, write_index

STORED, TIE, U = torch.arange(4.0), torch.full((4,), 7.0), torch.ones(3)
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]

Shard = tuple[dict[str, torch.Tensor], Mapping[str, str]]


def write(directory: Path, shards: Sequence[Shard], *, indexed: dict[str, int] | None = None) -> Path:
    """Write shards with their tied names, and an index with the number of the shard of each name."""
    for file, (tensors, ties) in zip(FILES, shards, strict=True):
        save_file(tensors, directory / file, declare_ties(ties, {"format": "pt", "by": "me"}))
    if indexed is not None:
        names = {file: [name for name, at in indexed.items() if at == number] for number, file in enumerate(FILES)}
        write_index(directory / SAFETENSORS_INDEX, names)
    return directory


@pytest.mark.parametrize("form", ["index", "parts", "list"])
def test_a_name_that_another_shard_stores_is_the_stored_tensor(tmp_path: Path, form: str) -> None:
    """Tools that split a file copy its metadata to each shard."""
    ties = {"tie": "i"}
    indexed = {"i": 0, "tie": 1} if form == "index" else None
    write(tmp_path, [({"i": STORED}, ties), ({"tie": TIE}, ties)], indexed=indexed)
    with sluice.open([tmp_path / file for file in FILES] if form == "list" else tmp_path) as checkpoint:
        assert not checkpoint.index.notes
        assert checkpoint.metadata == {"format": "pt", "by": "me"}
        found = sluice.load_state_dict(checkpoint)
    assert found.keys() == {"i", "tie"}
    assert torch.equal(found["tie"], TIE)


@pytest.mark.parametrize("indexed", [None, {"i": 0, "u": 1}, {"i": 0, "tie": 0, "u": 1}])
@pytest.mark.parametrize("declared", [(True, True), (True, False), (False, True)])
def test_a_declared_name_is_tied_across_shards(
    tmp_path: Path, indexed: dict[str, int] | None, declared: tuple[bool, bool]
) -> None:
    ties = [{"tie": "i"} if each else {} for each in declared]
    shards: list[Shard] = [({"i": STORED}, ties[0]), ({"u": U}, ties[1])]
    write(tmp_path, shards, indexed=indexed)
    with sluice.open(tmp_path) as checkpoint:
        assert set(checkpoint) == {"i", "tie", "u"}
        assert checkpoint["tie"].entry is checkpoint["i"].entry
        assert not checkpoint.index.notes
    assert not sluice.verify(tmp_path).notes


def test_a_name_whose_tensor_is_in_no_shard_is_left_out_with_one_note(tmp_path: Path) -> None:
    write(tmp_path, [({"i": STORED}, {"tie": "gone"}), ({"u": U}, {"tie": "gone"})])
    with sluice.open(tmp_path) as checkpoint:
        assert set(checkpoint) == {"i", "u"}
        (note,) = checkpoint.index.notes
    assert "not in the checkpoint (1): 'tie'" in note


def test_an_index_that_assigns_the_name_to_another_shard_is_not_overruled(tmp_path: Path) -> None:
    write(tmp_path, [({"i": STORED}, {"tie": "i"}), ({"u": U}, {})], indexed={"i": 0, "tie": 1, "u": 1})
    with pytest.raises(FormatError, match="'tie' is neither in"):
        sluice.open(tmp_path)


def test_a_name_that_is_declared_for_two_tensors(tmp_path: Path) -> None:
    write(tmp_path, [({"i": STORED}, {"tie": "i"}), ({"u": U}, {"tie": "u"})])
    with pytest.raises(FormatError, match="tied to different tensors"):
        sluice.open(tmp_path)
    write(tmp_path, [({"i": STORED}, {"tie": "i"}), ({"u": U, "v": TIE}, {"tie": "gone", "other": "i"})])
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint["tie"].entry is checkpoint["other"].entry is checkpoint["i"].entry
        assert not checkpoint.index.notes


def test_names_of_all_files_count_against_the_limit(tmp_path: Path) -> None:
    write(tmp_path, [({"i": STORED}, {"a": "i", "b": "i"}), ({"u": U}, {"c": "u", "d": "u"})])
    sluice.open(tmp_path, limits=Limits(entries=6)).close()
    with pytest.raises(LimitError, match="tied names exceeds"):
        sluice.open(tmp_path, limits=Limits(entries=5))


def link(directory: Path, name: str, other: str, *, symbolic: bool) -> None:
    if symbolic:
        (directory / f"{other}.pt").symlink_to(f"{name}.pt")
    else:
        os.link(directory / f"{name}.pt", directory / f"{other}.pt")


@pytest.mark.parametrize("symbolic", [False, True])
def test_links_between_equal_files_are_no_ties(tmp_path: Path, symbolic: bool) -> None:
    """Tools that remove duplicates link files of equal content, such as biases of zeros."""
    torch.save(torch.zeros(3), tmp_path / "a.pt")
    link(tmp_path, "a", "b", symbolic=symbolic)
    found = sluice.load_state_dict(tmp_path)
    found["a"] += 1
    assert torch.equal(found["b"], torch.zeros(3))
