"""Tied names that the files of a checkpoint declare together, and chunks before torch's writer consolidates them."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

import sluice
from sluice import FormatError, LimitError, Limits, UnsupportedError
from sluice.formats.safetensors.header import declare_ties
from support.directories import SAFETENSORS_INDEX, refusal, write_index

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
    refusal(tmp_path, FormatError, "'tie' is neither in")


def test_a_name_that_is_declared_for_two_tensors(tmp_path: Path) -> None:
    write(tmp_path, [({"i": STORED}, {"tie": "i"}), ({"u": U}, {"tie": "u"})])
    refusal(tmp_path, FormatError, "tied to different tensors")
    for named in ("gone", "far"):  # the tensor next to a declaration decides
        write(tmp_path, [({"i": STORED, "far": TIE}, {"tie": "i"}), ({"u": U}, {"tie": named, "other": "i"})])
        with sluice.open(tmp_path) as checkpoint:
            assert checkpoint["tie"].entry is checkpoint["other"].entry is checkpoint["i"].entry
            assert not checkpoint.index.notes


def test_names_of_all_files_count_against_the_limit(tmp_path: Path) -> None:
    write(tmp_path, [({"i": STORED}, {"a": "i", "b": "i"}), ({"u": U}, {"c": "u", "d": "u"})])
    sluice.open(tmp_path, limits=Limits(entries=6)).close()
    refusal(tmp_path, LimitError, "tied names exceeds", limits=Limits(entries=5))


@pytest.mark.parametrize("symbolic", [False, True])
def test_links_between_equal_files_are_no_ties(tmp_path: Path, symbolic: bool) -> None:
    """Tools that remove duplicates link files of equal content, such as biases of zeros."""
    torch.save(torch.zeros(3), tmp_path / "a.pt")
    (os.symlink if symbolic else os.link)(tmp_path / "a.pt", tmp_path / "b.pt")
    found = sluice.load_state_dict(tmp_path)
    found["a"] += 1
    assert torch.equal(found["b"], torch.zeros(3))


ONES = torch.ones(2, 3)


def write_chunks(directory: Path, *places: Any, **extra: str) -> Path:
    """Write a shard for each place of a chunk."""
    for number, place in enumerate(places, 1):
        text = json.dumps({"w": {"saved_offsets": place}})
        save_file(
            {"w": ONES},
            directory / f"shard-{number:05}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": text, "DCP_VERSION": "1.0", "format": "pt", **extra},
        )
    return directory


def test_what_torch_writes_without_ranks(tmp_path: Path) -> None:
    torch_writer = pytest.importorskip("torch.distributed.checkpoint.hf_storage").HuggingFaceStorageWriter
    if "save_distributed" not in inspect.signature(torch_writer).parameters:
        pytest.skip("this version of torch writes whole tensors only")
    state = {"w": torch.randn(4, 3), "s": torch.tensor(2.0)}
    with pytest.warns(UserWarning, match="single process"):
        save(state, storage_writer=torch_writer(str(tmp_path), save_distributed=True), no_dist=True)
    found = sluice.load_state_dict(tmp_path)
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("form", ["file", "list", "directory", "whole", "index"])
def test_chunks_are_refused_by_name(tmp_path: Path, form: str) -> None:
    directory = write_chunks(tmp_path, [0, 0], [2, 0])
    path = directory / "shard-00002-model-00001-of-00001.safetensors"
    source: Any = {"file": path, "list": [path], "directory": directory}.get(form)
    if form == "whole":
        source = path.rename(directory / "model.safetensors").parent
    elif form == "index":
        source = directory / "model.safetensors.index.json"
        source.write_text(json.dumps({"weight_map": {"w": path.name}}))
    error = refusal(source, UnsupportedError)
    assert error.tensor == "w"
    assert "enable_consolidation" in str(error)


def test_a_shard_of_whole_tensors_is_converted_without_places(tmp_path: Path) -> None:
    write_chunks(tmp_path, [0, 0], note="kept")
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    sluice.convert(path, tmp_path / "whole.safetensors")
    with safe_open(tmp_path / "whole.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "kept"}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "[" * 99_999, '{"w": {}}', '{"w": []}']
    + [f'{{"w": {{"saved_offsets": {place}}}}}' for place in ("[0, NaN]", "[0, true]", '"00"', "null")],
)
def test_places_that_are_not_what_torch_writes(tmp_path: Path, text: str) -> None:
    save_file({"w": ONES}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": text})
    refusal(tmp_path, FormatError, "description of chunks")


def test_places_count_against_the_limits(tmp_path: Path) -> None:
    many: list[Any] = [{str(number): {} for number in range(30)}, {"w": [0] * 1000}]
    for text in map(json.dumps, many):
        save_file({"w": ONES}, tmp_path / "m.safetensors", {"DCP_SHARDING_INFO": text})
        refusal(tmp_path / "m.safetensors", LimitError, "description of chunks", limits=Limits(entries=10))
