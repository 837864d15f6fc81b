"""Copies to an accelerator: a fake device that copies late, in any order, and checks every byte."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import sluice
from sluice._dtypes import dtype_name
from sluice.engine.accelerators import Accelerator
from sluice.engine.host_copies import StridedBytes
from sluice.engine.staging import StagingPool
from sluice.engine.targets import Targets
from sluice.planning.budget import shortages
from sluice.records import DeviceFacts, Elements, LoadPlan, Request
from support import fake_accelerator as _accelerator
from support.fake_accelerator import FakeAccelerator
from support.plans import MIB, Stored, entry_of, execute, facts, load, planned, request
from support.watching import watch

FAKE = "fake:0"


def requests_of(tensors: list[torch.Tensor], dtype: torch.dtype | None = None, **changes: Any) -> list[Request]:
    """Return the requests that load tensors onto the fake."""
    return [
        request(f"t{i}", entry_of(tensor, i), device=FAKE, dtype=dtype_name(dtype or tensor.dtype), **changes)
        for i, tensor in enumerate(tensors)
    ]


def check_load(
    path: Path, tensors: list[torch.Tensor], *, dtype: torch.dtype | None = None, seed: int = 0, **options: Any
) -> None:
    """Load all tensors onto the fake, and check that each byte arrived once."""
    loaded = load(path, tensors, requests_of(tensors, dtype), fake=FakeAccelerator(seed=seed), **options)
    for ours, expected in zip(loaded, tensors, strict=True):
        assert torch.equal(ours, expected.to(dtype or expected.dtype))


def tensors_of_all_kinds() -> list[torch.Tensor]:
    return [
        torch.randn(MIB),
        torch.randn(700, 500),
        torch.randn(300, 400).t(),
        torch.randn(64, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.arange(1000),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randint(0, 256, (999,), dtype=torch.uint8),
        torch.randn(500, dtype=torch.complex64),
    ]


@pytest.mark.parametrize("cores", [2, 16])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shift", [0, 3])
def test_every_byte_arrives_once_while_copies_are_late_and_out_of_order(
    tmp_path: Path, dtype: torch.dtype | None, cores: int, shift: int
) -> None:
    tensors = [t for t in tensors_of_all_kinds() if dtype is None or t.dtype == torch.float32]
    for seed in range(3):
        check_load(tmp_path / "f", tensors, dtype=dtype, cores=cores, seed=seed, shift=shift)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 400_000), min_size=1, max_size=6),
    staging=st.integers(MIB, 4 * MIB),
    seed=st.integers(0, 1000),
    to=st.sampled_from([None, torch.bfloat16]),
)
def test_any_sizes_through_any_gate(
    tmp_path: Path, sizes: list[int], staging: int, seed: int, to: torch.dtype | None
) -> None:
    tensors = [torch.arange(size, dtype=torch.float32) for size in sizes]
    check_load(tmp_path / "f", tensors, dtype=to, staging=staging, seed=seed, cores=8)


def test_the_fake_notices_staging_that_is_written_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(monkeypatch, StagingPool, "give_back", lambda _, buffer: buffer.tickets.clear())
    monkeypatch.setattr(_accelerator, "time", SimpleNamespace(sleep=lambda _: time.sleep(0.02)))  # later than the reads
    with pytest.raises(AssertionError, match="staging buffer was overwritten before"):
        check_load(tmp_path / "f", [torch.randn(4 * MIB)])


def test_the_fake_notices_what_arrives_twice_or_never() -> None:
    fake = FakeAccelerator()
    memory = fake.allocate(4, torch.float32)
    with pytest.raises(AssertionError, match="4 elements never arrived"):
        fake.assert_filled_once()
    raw = torch.zeros(8, dtype=torch.uint8)
    fake.begin(0)
    for _ in range(2):
        fake.copy(memory[:2], StridedBytes(raw, torch.float32, (2,), (1,)))
    fake.finish()
    with pytest.raises(AssertionError, match="2 elements never arrived, 2 more than once"):
        fake.assert_filled_once()


def test_a_failing_read_waits_for_the_copies_in_flight(tmp_path: Path) -> None:
    with Stored(tmp_path / "f", [torch.randn(4 * MIB)]) as stored:
        plan, _ = stored.plan_of(requests_of(stored.tensors), staging=MIB)
        os.truncate(tmp_path / "f", 8 * MIB)
        with pytest.raises(sluice.SourceChangedError):
            execute(plan, [stored.source], Targets(plan, accelerators={FAKE: FakeAccelerator()}))
    assert not any(thread.name == "fake-accelerator" for thread in threading.enumerate())


def test_one_block_is_reserved_unless_live_tensors_are_replaced(tmp_path: Path) -> None:
    with Stored(tmp_path / "f", [torch.randn(4 * MIB)]) as stored:
        for replaces, blocks in ((False, [16 * MIB]), (True, [])):
            plan, _ = stored.plan_of(requests_of(stored.tensors, replaces=replaces), staging=MIB)
            fake = FakeAccelerator()
            execute(plan, [stored.source], Targets(plan, accelerators={FAKE: fake}))
            assert fake.reserved_bytes == blocks


def device_plan(free_bytes: int | None) -> LoadPlan:
    known = DeviceFacts(device=FAKE, free_bytes=free_bytes, cached_bytes=MIB)
    machine = replace(facts(cached=True), devices=(known,))
    return planned(requests_of([torch.empty(16 * MIB)]), [(0, 64 * MIB)], machine)


def test_the_device_budget_is_free_and_cached_memory_or_the_callers_limit() -> None:
    plan = device_plan(70 * MIB)
    assert not shortages(plan, sluice.MemoryLimits())
    assert not shortages(plan, sluice.MemoryLimits(device=64 * MIB))
    short = shortages(plan, sluice.MemoryLimits(device=10 * MIB))
    assert "memory of fake:0" in str(short[0])
    assert short[0].allowed == "at most 10.0 MiB (MemoryLimits(device=...))"
    assert shortages(device_plan(20 * MIB), sluice.MemoryLimits())[0].allowed == (
        "at most 21.0 MiB (free on the device)"
    )
    assert not shortages(device_plan(None), sluice.MemoryLimits())


def test_blocking_copies_serve_devices_without_streams() -> None:
    link = Accelerator("cpu")
    memory = link.allocate(3, torch.bfloat16)
    link.begin(0)
    raw = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(torch.uint8)
    link.copy(memory, StridedBytes(raw, torch.float32, (3,), (2,)))
    link.mark()
    assert memory.tolist() == [1.0, 3.0, 5.0]
    doubled = Elements(dtype="float32", arithmetic=(("mul", 2.0), ("add", 1.0)))
    link.copy(memory, StridedBytes(raw, torch.float32, (3,), (2,), doubled))
    assert memory.tolist() == [3.0, 7.0, 11.0]
