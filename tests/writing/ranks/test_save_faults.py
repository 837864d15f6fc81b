"""Saves that fail on one rank: every rank raises, what existed is intact, and no hidden file is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import sluice
from sluice.writing.durable import direct
from support.divided_models import Net
from support.ranks import Ranks

FORMATS = {"model.safetensors": None, "model": "huggingface", "dcp": "dcp"}


def saved(path: Path, seed: int, *, rank: int = -1, write: int = -1, fault: str = "") -> str:
    """Save a divided model; with ``fault``, one write of one rank fails. Return the error, or nothing."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = Net()
    fully_shard(model)
    written = 0
    write_all = direct.write_all

    def counted(descriptor: int, offset: int, view: memoryview) -> None:
        nonlocal written
        written += 1
        if written == write and dist.get_rank() == rank:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")
        write_all(descriptor, offset, view)

    with (
        patch("sluice.writing.durable.shared_file.write_all", counted),
        patch("sluice.writing.durable.replacement.write_all", counted),
    ):
        try:
            sluice.save(model, path, format=FORMATS[path.name], max_shard_size=_shards(path), overwrite=True)  # type: ignore[arg-type]
        except sluice.SluiceError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _shards(path: Path) -> int | None:
    return 200 if path.name == "model" else None


def loaded(path: Path) -> dict[str, torch.Tensor]:
    return dict(sluice.load_state_dict(path))


def same(found: dict[str, torch.Tensor], seed: int) -> bool:
    torch.manual_seed(seed)
    expected = Net().state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items()) and len(found) == len(expected)


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*sluice*")]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_a_failed_write_on_one_rank_fails_every_rank(four_ranks: Ranks, tmp_path: Path, name: str, rank: int) -> None:
    path = tmp_path / name
    assert four_ranks.run(saved, path, 1) == [""] * 4
    for write in (1, 2, 5):
        (text,) = set(four_ranks.run(_faulty, path, rank, write))
        assert text.startswith(f"RankError: save failed on 1 of 4 ranks, and existing files are intact; rank {rank}")
        assert "No space left" in text
        assert same(loaded(path), 1)
        assert hidden(tmp_path) == []
    assert four_ranks.run(saved, path, 3) == [""] * 4  # the group is usable
    assert same(loaded(path), 3)


def _faulty(path: Path, rank: int, write: int) -> str:
    return saved(path, 2, rank=rank, write=write, fault="error")


def unpublished(path: Path) -> str:
    """Save on all ranks; the lead cannot rename the files."""
    import torch.distributed as dist

    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    if dist.get_rank():
        return saved(path, 2)
    with patch("os.replace", refused):
        return saved(path, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_a_failed_rename_fails_every_rank(four_ranks: Ranks, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    four_ranks.run(saved, path, 1)
    (text,) = set(four_ranks.run(unpublished, path))
    assert "existing files are intact; rank 0: SaveError" in text
    assert same(loaded(path), 1)
    assert hidden(tmp_path) == []


#: The rank that is killed in the CI profile: the lead, which creates the files, or the other one.
KILLED = {"model.safetensors": 1, "model": 0, "dcp": 1}


@pytest.mark.usefixtures("four_ranks")  # its server starts the processes: outside of a fixture it would count as a leak
@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param(name, rank, marks=[pytest.mark.long] * (rank != chosen))
        for name, chosen in KILLED.items()
        for rank in (0, 1)
    ],
)
def test_a_killed_rank_fails_the_other(tmp_path: Path, name: str, rank: int) -> None:
    path = tmp_path / name
    with Ranks(2) as ranks:
        assert ranks.run(saved, path, 1) == ["", ""]
        outcomes = ranks.outcomes(_killed, path, rank)
    assert outcomes[rank] == (False, "the process ended with exit code -9")
    assert f"rank {rank}: ended" in outcomes[1 - rank][1]
    assert same(loaded(path), 1)
    # A lead that is killed while it writes the header of its second shard has not told the path.
    assert len(hidden(tmp_path)) == (rank == 0 and name == "model")
    assert sluice.save(loaded(path), path, format=FORMATS[name], overwrite=True)  # type: ignore[arg-type]
    assert hidden(tmp_path) == []


def _killed(path: Path, rank: int) -> str:
    return saved(path, 2, rank=rank, write=3, fault="kill")
