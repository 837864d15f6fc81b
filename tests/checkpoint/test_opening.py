"""Checkpoints are opened through ``Directory``: with a directory in memory nothing touches the file system."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import sluice
from sluice._options import Limits
from sluice.checkpoint.opening import open_layout
from sluice.checkpoint.survey import survey
from sluice.entries import tree as trees
from sluice.formats.divided import divided_directory
from sluice.sources.directory import EntryKind
from sluice.sources.protocol import Source
from support import distributed
from support.directories import save, tensors, two_shards
from support.recorded_reads import RecordingSource
from support.sources import MemorySource


class Named(NamedTuple):
    """An entry of a listing in memory."""

    name: str
    kind: EntryKind = "file"


class MemoryDirectory:
    """A prefix of an object store in memory; records which of its methods are called."""

    def __init__(self, contents: dict[str, bytes], *, escaping: frozenset[str] = frozenset()) -> None:
        self.path = "store://bucket/model"
        self.contents = contents
        self.escaping = escaping
        self.calls: list[tuple[str, ...]] = []
        self.opened: list[RecordingSource] = []

    def entries(self) -> Iterator[Named]:
        self.calls.append(("entries",))
        yield from (Named(name) for name in sorted(self.contents))

    def open(self, name: str) -> Source:
        self.calls.append(("open", name))
        path = f"{self.path}/{name}"
        try:
            content = self.contents[name]
        except KeyError:
            missing = FileNotFoundError(name)
            raise sluice.CheckpointError("the object does not exist", file=path) from missing
        self.opened.append(RecordingSource(MemorySource(content, path=path)))
        return self.opened[-1]

    def check_inside(self, name: str) -> None:
        self.calls.append(("check_inside", name))
        if name in self.escaping:
            raise sluice.PathEscapeError("the object lies elsewhere", file=f"{self.path}/{name}")


def in_memory(directory: Path, **options: frozenset[str]) -> MemoryDirectory:
    """Move a local directory into memory and delete its files, so that only the copy can be read."""
    made = MemoryDirectory({file.name: file.read_bytes() for file in directory.iterdir()}, **options)
    for file in directory.iterdir():
        file.unlink()
    return made


def names(directory: MemoryDirectory, limits: Limits | None = None) -> set[str]:
    limits = limits or Limits()
    index, files = open_layout(survey(directory, limits), limits)
    assert all(record.path.startswith("store://bucket/model/") for record in index.files)
    assert {file.source.path for file in files} == {record.path for record in index.files}
    return set(trees.flatten(index.tree, limits))


def shards(path: Path) -> None:
    two_shards(path)


def parameters(path: Path) -> None:
    for name in ("a.w", "a.b", "c", "b.w"):
        save(path / f"{name}.pt", torch.ones(2))


def one_file(path: Path) -> None:
    save(path / "model.safetensors", tensors("a.w", "a.b", "c", "b.w"))


def chunks(path: Path) -> None:
    values = {name: distributed.rows(torch.ones(4, 2), 2) for name in ("a.w", "a.b", "c", "b.w")}
    distributed.write(path, values)


@pytest.mark.parametrize("write", [shards, parameters, one_file, chunks])
def test_every_layout_opens_from_any_directory(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    directory = in_memory(tmp_path)
    assert names(directory) == {"a.w", "a.b", "c", "b.w"}
    assert directory.calls[0] == ("entries",)
    assert ("check_inside",) not in {call[:1] for call in directory.calls}  # links are allowed by default
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("write", [shards, one_file, chunks])
def test_containment_is_checked_before_each_file_is_opened(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    strict = Limits(symlinks_outside=False)
    directory = in_memory(tmp_path)
    names(directory, strict)
    opened = [call[1] for call in directory.calls if call[0] == "open"]
    for name in opened:
        assert directory.calls.index(("check_inside", name)) < directory.calls.index(("open", name))
        refusing = MemoryDirectory(directory.contents, escaping=frozenset({name}))
        with pytest.raises(sluice.PathEscapeError) as caught:
            names(refusing, strict)
        assert caught.value.file == f"store://bucket/model/{name}"
        assert ("open", name) not in refusing.calls


def test_a_missing_object_is_reported_as_a_missing_file(tmp_path: Path) -> None:
    first, second = two_shards(tmp_path)
    directory = in_memory(tmp_path)
    del directory.contents[second.name]
    with pytest.raises(sluice.IncompleteCheckpointError, match=f"'{second.name}'") as caught:
        names(directory)
    assert caught.value.file == "store://bucket/model/model.safetensors.index.json"
    assert f"'{first.name}'" not in caught.value.problem


def test_divided_states_are_recognized_in_any_directory() -> None:
    assert divided_directory(MemoryDirectory({"model.bin": b""})) is None
    found = divided_directory(MemoryDirectory({"distrib_optim.pt": b""}))
    assert found is not None
    assert "Megatron" in found.what
    with pytest.raises(sluice.FormatError, match="such as 'global_step7'"):
        survey(MemoryDirectory({"latest": b"", "global_step7": b""}), Limits())
