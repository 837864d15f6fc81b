"""Memory and reads of loads on several ranks of one host, measured by the kernel and summed over all processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.divided_models import local, mesh_of
from support.ranks import Ranks

MIB = 1 << 20
SIDE = 2047  # uneven: the last of four ranks holds a row less
LAYERS = 8


def _kernel(file: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def _divided() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh_of(4))
    fully_shard(model, mesh=mesh_of(4))
    return model


def measured(path: Path, dtype: torch.dtype | None) -> dict[str, Any]:
    """Load on this rank; return what the kernel counted, in bytes."""
    sluice.load_into(_divided(), path, dtype=dtype)  # imports, and lazily made threads and buffers of torch
    model = _divided()
    Path("/proc/self/clear_refs").write_text("5")
    before, read = _kernel("status", "VmRSS") << 10, _kernel("io", "rchar")
    report = sluice.load_into(model, path, dtype=dtype)
    return {
        "growth": (_kernel("status", "VmHWM") << 10) - before,
        "read": _kernel("io", "rchar") - read,
        "local": sum(local(parameter).nbytes for parameter in model.parameters()),
        "predicted": report.predicted.total_bytes,
        "reads": sum(report.reads.values()),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file: Path = tmp_path_factory.mktemp("large") / "m.pth"
    state = {}
    for layer in range(LAYERS):
        state[f"{layer}.weight"] = torch.full((SIDE, SIDE), float(layer))
        state[f"{layer}.bias"] = torch.full((SIDE,), float(layer))
    torch.save(state, file)
    return file


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_ranks_of_a_host_hold_their_parts_and_share_one_gate(
    path: Path, dtype: torch.dtype | None, four_ranks: Ranks
) -> None:
    ranks = four_ranks.run(measured, path, dtype)
    total = {key: sum(rank[key] for rank in ranks) for key in ranks[0]}
    assert total["growth"] <= total["local"] + (64 + 4 * 32) * MIB
    assert all(rank["growth"] <= rank["local"] + (64 // 4 + 32) * MIB for rank in ranks)
    assert all(rank["growth"] <= rank["predicted"] for rank in ranks)
    assert total["read"] <= 1.02 * path.stat().st_size
    assert total["reads"] <= 1.02 * path.stat().st_size


def offloaded(path: Path) -> tuple[int, int]:
    """Return the predictions for parameters that stay, and for parameters that fully_shard page-locks."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS)))
    fully_shard(model, mesh=mesh_of(4), offload_policy=CPUOffloadPolicy(pin_memory=True))
    memory = sluice.MemoryLimits(staging="1MiB")  # it is free when the copies are made
    stays, copied = (sluice.plan(each, path, memory=memory) for each in (_divided(), model))
    return stays.predicted.total_bytes, copied.predicted.total_bytes


def test_page_locked_copies_of_fully_shard_are_predicted(path: Path, four_ranks: Ranks) -> None:
    for stays, copied in four_ranks.run(offloaded, path)[:3]:  # the last rank copies in any case
        assert copied >= stays + 3 * MIB  # each shard of 4 MiB is copied, one after the other
