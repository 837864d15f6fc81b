"""The ring that is planned for an accelerator keeps disk and device busy, whichever is faster, in a model."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from msgspec.structs import replace

from sluice.planning.memory_layout import single_targets
from sluice.planning.planner import plan_load
from sluice.records import LoadPlan
from support.plans import MIB, entry_of, facts, index_of, request
from support.ring_model import use_of_ring


@cache
def plan(*, cached: bool, cores: int, staging: int, dtype: str = "float32") -> LoadPlan:
    """Return the plan of 120 tensors of 36 MiB, for a device."""
    tensor = torch.empty(9 * MIB, device="meta")
    requests = [request(f"t{i}", entry_of(tensor, i), device="fake:0", dtype=dtype) for i in range(120)]
    index = index_of([(i * 36 * MIB, 36 * MIB) for i in range(120)])
    targets, _ = single_targets(requests, index, {})
    return plan_load(targets, index.files, facts(cached=cached, cores=cores), staging_bytes=staging)


@pytest.mark.parametrize(("read_rate", "copy_rate"), [(1, 1), (1, 4), (4, 1)], ids=["1:1", "1:4", "4:1"])
@pytest.mark.parametrize("staging", [16 * MIB, 64 * MIB, pytest.param(256 * MIB, marks=pytest.mark.long)])
@pytest.mark.parametrize(("cached", "cores"), [(False, 2), (False, 16), (True, 2), (True, 16)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_the_slower_of_disk_and_device_never_waits_for_the_other(
    cached: bool, cores: int, staging: int, dtype: str, read_rate: int, copy_rate: int
) -> None:
    made = plan(cached=cached, cores=cores, staging=staging, dtype=dtype)
    assert made.staging_buffers * made.staging_buffer_bytes <= staging
    assert made.device_scratch_bytes <= max(made.staging_buffer_bytes + 2 * MIB, 10 * MIB)
    used = use_of_ring(made, read_rate=read_rate * 1e9, copy_rate=copy_rate * 1e9)
    # A reader that has only one buffer waits while the device copies from it: n of n + 1 parts of the time are left.
    most = min(made.readers, made.staging_buffers)
    assert used.slower_busy >= (0.96 * most / (most + 1) if made.staging_buffers <= made.readers else 0.95)


def test_the_model_shows_a_ring_of_one_buffer_as_too_small() -> None:
    made = replace(plan(cached=False, cores=2, staging=64 * MIB), staging_buffers=1, readers=1)
    assert use_of_ring(made, read_rate=1e9, copy_rate=1e9).slower_busy == pytest.approx(0.5, abs=0.01)
