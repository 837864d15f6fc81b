"""Saves by ranks: what each of them holds, and faults of one of them."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import sluice
from sluice import _defaults as defaults
from sluice.machine.processes import PeakMeter
from sluice.writing.durable import direct
from support.directories import assert_same
from support.divided_models import Net
from support.ranks import Ranks

FORMATS = {"model.safetensors": None, "model": "huggingface", "dcp": "dcp"}


def saved(path: Path, seed: int, rank: int = -1, write: int = -1, fault: str = "error") -> str:
    """Save a divided model; one write of one rank fails, or the rank is killed. Return the error, or nothing."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = Net()
    fully_shard(model)
    written, shards = 0, 200 if path.name == "model" else None
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
        patch("sluice.writing.ranks.shared_writes.write_all", counted),
        patch("sluice.writing.durable.replacement.write_all", counted),
    ):
        try:
            sluice.save(model, path, format=FORMATS[path.name], max_shard_size=shards, overwrite=True)  # type: ignore[arg-type]
        except sluice.SluiceError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def assert_holds(path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    assert_same(sluice.load_state_dict(path), Net().state_dict())


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*sluice*")]


def unpublished(path: Path) -> str:
    """Save on all ranks; the lead cannot rename the files."""
    read_only = OSError(30, "Read-only file system")
    with nullcontext() if torch.distributed.get_rank() else patch("os.replace", side_effect=read_only):
        return saved(path, 2)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_a_failed_write_or_rename_fails_every_rank(four_ranks: Ranks, tmp_path: Path, name: str, rank: int) -> None:
    path = tmp_path / name
    assert four_ranks.run(saved, path, 1) == [""] * 4
    for write in (1, 2, 5):
        (text,) = set(four_ranks.run(saved, path, 2, rank, write))
        assert text.startswith(f"RankError: save failed on 1 of 4 ranks, and existing files are intact; rank {rank}")
        assert "No space left" in text
        assert_holds(path, 1)
        assert hidden(tmp_path) == []
    (text,) = set(four_ranks.run(unpublished, path))
    assert "existing files are intact; rank 0: SaveError" in text
    assert_holds(path, 1)
    assert hidden(tmp_path) == []
    assert four_ranks.run(saved, path, 3) == [""] * 4  # the group is usable
    assert_holds(path, 3)


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
        outcomes = ranks.outcomes(saved, path, 2, rank, 3, "kill")
    assert outcomes[rank] == (False, "the process ended with exit code -9")
    assert f"rank {rank}: ended" in outcomes[1 - rank][1]
    assert_holds(path, 1)
    # A lead that is killed while it writes the header of its second shard has not told the path.
    assert len(hidden(tmp_path)) == (rank == 0 and name == "model")
    assert sluice.save(sluice.load_state_dict(path), path, format=FORMATS[name], overwrite=True)  # type: ignore[arg-type]
    assert hidden(tmp_path) == []


_MIB = 1 << 20

#: The tensors to save, kept between two functions on a rank.
_STATE: dict[str, torch.Tensor] = {}


def numbered(rows: range, columns: range, width: int) -> torch.Tensor:
    """Return a part of a tensor whose elements have their positions as values."""
    return torch.tensor(rows).float()[:, None] * width + torch.tensor(columns).float()


def prepare(directory: Path) -> None:
    """Make tensors that are much larger than staging, divided by columns and by rows, and import everything."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()

    def divided(local: torch.Tensor, dim: int, *shape: int) -> torch.Tensor:
        made: torch.Tensor = DTensor.from_local(
            local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )
        return made

    _STATE["small"] = divided(torch.ones(2, 1), 1, 2, 2)
    _STATE["columns"] = divided(numbered(range(4096), range(2048 * rank, 2048 * (rank + 1)), 4096), 1, 4096, 4096)
    _STATE["rows"] = divided(
        numbered(range(2050 * rank, min(2050 * (rank + 1), 4099)), range(1023), 1023), 0, 4099, 1023
    )
    for path, form in (("a.safetensors", None), ("a", "dcp")):
        sluice.save({"small": _STATE["small"]}, directory / path, format=form)  # type: ignore[arg-type]


def growth_of_save(path: Path, dtype: torch.dtype | None) -> int:
    """Return the bytes by which the memory of this rank grows."""
    state = {name: tensor for name, tensor in _STATE.items() if name != "small"}
    with PeakMeter() as meter:
        sluice.save(state, path, format=None if path.suffix else "dcp", dtype=dtype)
    return meter.peaks.total_bytes


def forget() -> None:
    _STATE.clear()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the kernel's record of the peak")
def test_every_rank_takes_its_share_of_staging(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(prepare, tmp_path)
    files = [("v.safetensors", None), ("w.safetensors", torch.bfloat16), ("w", torch.float64)]
    try:
        for path, dtype in files:
            for growth in two_ranks.run(growth_of_save, tmp_path / path, dtype):
                assert growth <= defaults.SAVE_STAGING_BYTES // 2 + 8 * _MIB, f"{path}: {growth / _MIB:.1f} MiB"
    finally:
        two_ranks.run(forget)
    for path, dtype in files:
        loaded = sluice.load_state_dict(tmp_path / path)
        assert torch.equal(loaded["columns"], numbered(range(4096), range(4096), 4096).to(dtype))
        assert torch.equal(loaded["rows"], numbered(range(4099), range(1023), 1023).to(dtype))
