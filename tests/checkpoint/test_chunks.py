"""Shards of torch's writer for Hugging Face: whole tensors, and chunks before they are consolidated."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

import sluice
from sluice import FormatError, LimitError, Limits, UnsupportedError

ONES = torch.ones(2, 3)


def write(directory: Path, *places: Any, **extra: str) -> Path:
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
    directory = write(tmp_path, [0, 0], [2, 0])
    path = directory / "shard-00002-model-00001-of-00001.safetensors"
    source: Any = {"file": path, "list": [path], "directory": directory}.get(form)
    if form == "whole":
        source = path.rename(directory / "model.safetensors").parent
    elif form == "index":
        source = directory / "model.safetensors.index.json"
        source.write_text(json.dumps({"weight_map": {"w": path.name}}))
    with pytest.raises(UnsupportedError, match="enable_consolidation") as caught:
        sluice.open(source)
    assert caught.value.tensor == "w"


def test_a_shard_of_whole_tensors_is_converted_without_places(tmp_path: Path) -> None:
    write(tmp_path, [0, 0], note="kept")
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
    with pytest.raises(FormatError, match="description of chunks"):
        sluice.open(tmp_path)


def test_places_count_against_the_limits(tmp_path: Path) -> None:
    many: list[Any] = [{str(number): {} for number in range(30)}, {"w": [0] * 1000}]
    for text in map(json.dumps, many):
        save_file({"w": ONES}, tmp_path / "m.safetensors", {"DCP_SHARDING_INFO": text})
        with pytest.raises(LimitError, match="description of chunks"):
            sluice.open(tmp_path / "m.safetensors", limits=Limits(entries=10))
