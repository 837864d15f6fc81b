"""Directories and shard indexes: files that are read, and resources that opening takes."""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from sluice._defaults import INDEXING_THREADS
from support import fresh_process
from support.directories import (
    SAFETENSORS_INDEX,
    assert_same,
    read_with_their_library,
    save,
    save_sharded,
    tensors,
    two_shards,
    write_index,
)
from support.watching import watch

# Files that are read


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("by_index", [False, True], ids=["directory", "index file"])
def test_shards_read_as_their_library_reads_them(tmp_path: Path, suffix: str, by_index: bool) -> None:
    shards = two_shards(tmp_path, suffix)
    expected = {name: tensor for shard in shards for name, tensor in read_with_their_library(shard).items()}
    source = next(tmp_path.glob("*.json")) if by_index else tmp_path
    assert_same(sluice.load_state_dict(source), expected)
    with sluice.open(source) as checkpoint:
        assert checkpoint.format == {".safetensors": "huggingface-safetensors", ".bin": "huggingface-bin"}[suffix]
        assert checkpoint.files == tuple(map(str, shards))
        assert checkpoint.path == str(source)
        assert checkpoint.index.notes == ()
        assert checkpoint.nbytes == 4 * 48
        assert list(checkpoint) == list(expected)
        assert torch.equal(checkpoint["b.w"][1:, 2].read(), expected["b.w"][1:, 2])
        assert checkpoint.tree["c"].storage_key == checkpoint["c"].storage_key
        if suffix == ".safetensors":
            assert checkpoint.metadata == {"format": "pt"}
        else:
            assert checkpoint.metadata["byteorder"] == "little"


def test_views_and_parameters_of_pickled_shards_keep_their_types(tmp_path: Path) -> None:
    base = torch.arange(20.0)
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    save(tmp_path / "1.bin", {"u": torch.zeros(2)})
    save(tmp_path / "2.bin", {"x": base[2:], "y": base[:4], "w": weight, "tied": weight})
    write_index(tmp_path / "pytorch_model.bin.index.json", {"1.bin": ["u"], "2.bin": ["x", "y", "w", "tied"]})
    state_dict = sluice.load_state_dict(tmp_path)
    assert state_dict["x"].data_ptr() == state_dict["y"].data_ptr() + 8
    assert state_dict["tied"] is state_dict["w"]
    assert isinstance(state_dict["w"], nn.Parameter)
    assert torch.equal(state_dict["x"], base[2:])


def test_other_values_and_versions_of_pickled_shards_are_kept(tmp_path: Path) -> None:
    state_dict = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).state_dict()
    first = OrderedDict((name, state_dict[name]) for name in list(state_dict)[:3])
    first._metadata = state_dict._metadata  # type: ignore[attr-defined]
    deep = torch.ones(2)
    rest = {"deep": [deep, {"same": deep}], "step": 3, **{name: state_dict[name] for name in list(state_dict)[3:]}}
    save(tmp_path / "1.bin", first)
    save(tmp_path / "2.bin", rest)
    write_index(tmp_path / "pytorch_model.bin.index.json", {"1.bin": first, "2.bin": rest})
    found = sluice.load_state_dict(tmp_path)
    assert found._metadata == state_dict._metadata  # type: ignore[attr-defined]
    assert found["step"] == 3
    assert found["deep"][0] is found["deep"][1]["same"]
    assert torch.equal(found["deep"][0], deep)


def test_a_single_file_keeps_its_nesting(tmp_path: Path) -> None:
    save(tmp_path / "pytorch_model.bin", {"model": tensors("w"), "epoch": 3})
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint.format == "huggingface-bin"
        assert checkpoint.tree["epoch"] == 3
        assert list(checkpoint) == ["model.w"]


def test_legacy_names_and_dots_become_names_of_parameters(tmp_path: Path) -> None:
    expected = tensors("blocks.0.weight", "scale", "odd name.pt")
    for name, tensor in expected.items():
        save(tmp_path / f"{name}.pt", nn.Parameter(tensor))
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint.format == "per-parameter"
        assert {name: tensor.read().tolist() for name, tensor in checkpoint.items()} == {
            name: tensor.tolist() for name, tensor in expected.items()
        }
    assert isinstance(sluice.load_state_dict(tmp_path)["scale"], nn.Parameter)


# Resources


@pytest.mark.usefixtures("fresh_processes")
def test_five_hundred_shards_under_a_small_limit_of_descriptors(tmp_path: Path) -> None:
    shards = {f"{number:03}.bin": {f"w{number}": torch.full((64,), float(number))} for number in range(500)}
    save_sharded(tmp_path, "pytorch_model.bin.index.json", shards)
    code = """if True:
        import resource, sys
        import torch, sluice
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        state_dict = sluice.load_state_dict(sys.argv[1])
        assert all(state_dict[f"w{i}"].eq(i).all() for i in range(500)) and len(state_dict) == 500
    """
    done = fresh_process.run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 32


def test_a_shard_is_opened_and_read_once_and_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening reads shards concurrently; ``bench.index`` measures its time for a thousand shards."""
    shards = {f"{n:04}.safetensors": tensors(*(f"layers.{n}.{i}" for i in range(20))) for n in range(100)}
    save_sharded(tmp_path, SAFETENSORS_INDEX, shards)
    opened: Counter[str] = Counter()
    read: Counter[int] = Counter()
    readers: set[str] = set()
    together = threading.Barrier(INDEXING_THREADS, timeout=90)  # passed only by that many concurrent readers

    def note_read(descriptor: int, *_: object) -> None:
        name = threading.current_thread().name
        if name not in readers and Path(os.readlink(f"/proc/self/fd/{descriptor}")).name in shards:
            readers.add(name)
            together.wait()
        read[descriptor] += 1

    watch(monkeypatch, os, "open", lambda path, *_: opened.update([Path(path).name]))
    watch(monkeypatch, os, "preadv", note_read)
    with sluice.open(tmp_path) as checkpoint:
        assert len(checkpoint) == 2000
    assert {name: opened[name] for name in shards} == dict.fromkeys(shards, 1)
    assert sum(read.values()) <= len(shards) + 2  # a header of this size is one read; the index file is another
    assert len(readers) == INDEXING_THREADS
