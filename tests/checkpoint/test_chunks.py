"""Shards of torch's writer for Hugging Face, before they are consolidated."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

import sluice
from sluice import FormatError, IncompleteCheckpointError, LimitError, Limits

Chunks = Mapping[str, tuple[torch.Tensor, Any]]


def write(directory: Path, files: list[Chunks], **extra: str) -> Path:
    """Write each mapping of a name to a chunk and its place as one shard."""
    for number, chunks in enumerate(files, 1):
        places = json.dumps({name: {"saved_offsets": place} for name, (_, place) in chunks.items()})
        save_file(
            {name: chunk.contiguous() for name, (chunk, _) in chunks.items()},
            directory / f"shard-{number:05}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": places, "DCP_VERSION": "1.0", "format": "pt", **extra},
        )
    return directory


RANKS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

def save(rank, ranks, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}.store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    full = {"rows": torch.randn(7, 5), "columns": torch.randn(4, 6).bfloat16(), "copies": torch.randn(3),
            "plain": torch.arange(5), "scalar": torch.tensor(3.5), "empty": torch.empty(0, 3)}
    placements = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    state = {name: distribute_tensor(tensor, mesh, [placements[name]]) if name in placements else tensor
             for name, tensor in full.items()}
    files = {name: number % 2 + 1 for number, name in enumerate(state)} if ranks % 2 else None
    writer = dcp.HuggingFaceStorageWriter(directory, save_distributed=True, fqn_to_index_mapping=files)
    dcp.save(state, storage_writer=writer)
    if rank == 0:
        torch.save(full, f"{directory}.pth")
    dist.destroy_process_group()

if __name__ == "__main__":
    for ranks in range(1, 5):
        mp.spawn(save, (ranks, sys.argv[1] + str(ranks)), nprocs=ranks)
"""


@pytest.mark.long
def test_what_one_to_four_ranks_write(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    subprocess.run([sys.executable, tmp_path / "ranks.py", tmp_path / "d"], check=True, capture_output=True)
    for ranks in range(1, 5):
        full = torch.load(tmp_path / f"d{ranks}.pth", weights_only=True)
        found = sluice.load_state_dict(tmp_path / f"d{ranks}")
        assert found.keys() == full.keys()
        assert all(torch.equal(found[name], full[name]) for name in full)


def test_what_torch_writes_without_ranks(tmp_path: Path) -> None:
    torch_writer = pytest.importorskip("torch.distributed.checkpoint.hf_storage").HuggingFaceStorageWriter
    if "save_distributed" not in inspect.signature(torch_writer).parameters:
        pytest.skip("this version of torch writes whole tensors only")
    state = {"w": torch.randn(4, 3), "s": torch.tensor(2.0)}
    with pytest.warns(UserWarning, match="single process"):
        save(state, storage_writer=torch_writer(str(tmp_path), save_distributed=True), no_dist=True)
    found = sluice.load_state_dict(tmp_path)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_chunks_are_joined_and_slices_read_what_they_need(tmp_path: Path) -> None:
    whole, grid = torch.randn(7, 4), torch.arange(24.0).reshape(4, 6)
    write(
        tmp_path,
        [
            {"rows": (whole[:3], [0, 0]), "grid": (grid[:2, :2], [0, 0]), "bias": (torch.ones(2), [0])},
            {"rows": (whole[3:], [3, 0]), "grid": (grid[:2, 2:], [0, 2])},
            {"rows": (whole[:0], [7, 0]), "grid": (grid[2:], [2, 0]), "none": (torch.empty(0, 2), [0, 0])},
        ],
        note="kept",
    )
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint.format == "safetensors-chunks"
        assert checkpoint.metadata == {"format": "pt", "note": "kept"}
        assert len(checkpoint.files) == 3
        assert "chunks: 2, of 8" in checkpoint.index.notes[0]
        assert torch.equal(checkpoint["grid"][1:3, 1:5].read(), grid[1:3, 1:5])
        found = sluice.load_state_dict(checkpoint)
    expected = {"rows": whole, "grid": grid, "bias": torch.ones(2), "none": torch.empty(0, 2)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sluice.verify(tmp_path).ok
    path = tmp_path.parent / "whole.safetensors"
    sluice.convert(tmp_path, path, overwrite=True)
    assert all(torch.equal(one, expected[name]) for name, one in load_file(path).items())


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([{"w": (ONES, [0, 0])}, {"w": (ONES, [1, 0])}], "overlap"),
        ([{"w": (ONES, [0, 0])}, {"w": (ONES, [0, 0])}], "overlap"),
        ([{"w": (ONES, [0, 0])}, {"w": (ONES.double(), [2, 0])}], "differ in dtype"),
        ([{"w": (ONES, [0, 0])}, {"w": (torch.ones(3), [2])}], "differ in dtype"),
        ([{"w": (ONES, [0])}], "no valid place"),
        ([{"w": (ONES, [0, 2**63 - 2])}], "no valid place"),
    ],
)
def test_chunks_that_contradict_each_other(tmp_path: Path, files: list[Chunks], problem: str) -> None:
    write(tmp_path, files)
    with pytest.raises(FormatError, match=problem) as caught:
        sluice.open(tmp_path)
    assert caught.value.tensor == "w"
    assert "shard-0000" in str(caught.value.file)


@pytest.mark.parametrize("places", [[[0, 0], [3, 0]], [[1, 0]], [[2**62, 2**62]]])
def test_a_gap_is_missing_shards_not_damage(tmp_path: Path, places: list[list[int]]) -> None:
    write(tmp_path, [{"w": (ONES, place)} for place in places])
    with pytest.raises(IncompleteCheckpointError, match=r"leave a gap.*pass the directory") as caught:
        sluice.open(tmp_path)
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("form", ["file", "list", "stream", "whole", "index"])
def test_the_shard_of_a_later_rank_alone_is_incomplete(tmp_path: Path, form: str) -> None:
    stack = ExitStack()
    directory = write(tmp_path, [{"w": (ONES, [0, 0])}, {"w": (ONES, [2, 0])}])
    path = directory / "shard-00002-model-00001-of-00001.safetensors"
    source: Any = path
    if form == "list":
        source = [path]
    elif form == "stream":
        source = stack.enter_context(path.open("rb"))
    elif form == "whole":
        source = path.rename(directory / "model.safetensors").parent
    elif form == "index":
        source = directory / "model.safetensors.index.json"
        source.write_text(json.dumps({"weight_map": {"w": path.name}}))
    with stack, pytest.raises(IncompleteCheckpointError, match="pass the directory") as caught:
        sluice.open(source)
    assert caught.value.tensor == "w"


def test_a_shard_of_whole_tensors_opens_alone_and_is_converted_without_places(tmp_path: Path) -> None:
    write(tmp_path, [{"w": (ONES, [0, 0])}], note="kept")
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    with sluice.open(path) as checkpoint:
        assert checkpoint.metadata == {"format": "pt", "note": "kept"}
        assert "shapes" in checkpoint.index.notes[0]
    sluice.convert(path, tmp_path / "whole.safetensors")
    with safe_open(tmp_path / "whole.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "kept"}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "{}", "[" * 99_999, '{"w": {}}', '{"w": []}']
    + [f'{{"w": {{"saved_offsets": {place}}}}}' for place in ("[0, NaN]", "[0, -1]", "[0, true]", '"00"', "null")],
)
def test_places_that_are_not_what_torch_writes(tmp_path: Path, text: str) -> None:
    save_file({"w": ONES}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": text})
    with pytest.raises(FormatError, match="description of chunks|no valid place"):  # noqa: RUF043 - alternatives
        sluice.open(tmp_path)


def test_chunks_count_against_the_limits(tmp_path: Path) -> None:
    write(tmp_path, [{"w": (ONES, [2 * number, 0])} for number in range(4)])
    sluice.open(tmp_path, limits=Limits(entries=8)).close()
    with pytest.raises(LimitError, match="corners"):
        sluice.open(tmp_path, limits=Limits(entries=7))
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    many: list[Any] = [{str(number): {} for number in range(30)}, {"w": [0] * 1000}]
    for text in map(json.dumps, many):
        save_file({"w": ONES}, path, {"DCP_SHARDING_INFO": text})
        with pytest.raises(LimitError, match="places of chunks"):
            sluice.open(path, limits=Limits(entries=10))
    places = json.dumps({"[,{" * 1000: {"saved_offsets": [0, 0]}})
    save_file({"[,{" * 1000: ONES}, path, {"DCP_SHARDING_INFO": places})
    sluice.open(path, limits=Limits(entries=10)).close()
