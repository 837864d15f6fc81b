"""Requests and rings of a plan: parallelism, gaps, readers and buffers."""

from __future__ import annotations

import itertools
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import sluice
from sluice.machine.facts import file_facts, machine_facts
from sluice.planning.memory_layout import single_targets
from sluice.planning.planner import plan_load
from sluice.planning.reads import join_requests
from sluice.records import AccessFacts, FileFacts, LoadPlan, MachineFacts, Read, Request, local_access, requests_of
from sluice.sources.protocol import Source
from sluice.sources.wrappers import ReadAhead, Section
from support.plans import FILE, MIB, entry, entry_of, facts, index_of, planned, request, use_of_ring
from support.sources import MemorySource, RecordingSource, record_reads

#: An object store: large requests, wide gaps, many at once.
STORE = AccessFacts(request_bytes=16 * MIB, gap_bytes=4 * MIB, parallel_requests=32)

#: A slow server: small requests, one at a time.
SLOW = AccessFacts(request_bytes=MIB, gap_bytes=0, parallel_requests=1)


plan = partial(planned, staging=1024 * MIB)


def with_access(machine: MachineFacts, *accesses: AccessFacts) -> MachineFacts:
    return replace(machine, files=tuple(replace(machine.files[0], access=access) for access in accesses))


def large(*, dtype: str = "float32", mib: int = 256) -> Request:
    return request("w", entry((mib * MIB // 4,)), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["in place", "staged"])
@pytest.mark.parametrize("access", [STORE, SLOW], ids=["store", "slow"])
def test_reads_are_as_long_as_requests_may_be(dtype: str, access: AccessFacts) -> None:
    made = plan([large(dtype=dtype)], [(0, 256 * MIB)], with_access(facts(cached=False, direct_io=False), access))
    longest = max(read.nbytes for read in made.reads)
    assert access.request_bytes // 2 < longest <= access.request_bytes
    assert sum(read.nbytes for read in made.reads) == 256 * MIB


@pytest.mark.parametrize(("access", "readers"), [(STORE, 32), (SLOW, 1)], ids=["store", "slow"])
def test_readers_and_buffers_follow_the_parallelism(access: AccessFacts, readers: int) -> None:
    machine = with_access(facts(cached=False, direct_io=False, cores=1), access)
    made = plan([large(dtype="bfloat16", mib=1024)], [(0, 1024 * MIB)], machine)
    assert made.readers == readers
    assert made.staging_buffer_bytes == access.request_bytes
    assert made.staging_buffers == (2 * readers if readers > 1 else 1)


@pytest.mark.parametrize(("gap", "reads"), [(0, 4), (600, 2), (2 * MIB, 1)])
def test_the_gap_decides_which_neighbors_share_a_read(gap: int, reads: int) -> None:
    requests = [request(f"b{i}", entry((100,), storage=i)) for i in range(4)]
    machine = with_access(facts(cached=False), replace(local_access(), gap_bytes=gap))
    made = plan(requests, [(0, 400), (1000, 400), (MIB, 400), (MIB + 1000, 400)], machine)
    assert [len(read.copies) for read in made.reads] == [4 // reads] * reads


def test_each_file_keeps_its_own_gap_and_request_size() -> None:
    """In a plan over two sources, buffers fit the larger requests, and reads of the other source stay small."""
    machine = with_access(facts(cached=False, direct_io=False), STORE, SLOW)
    index = index_of([(0, 64 * MIB), (0, 64 * MIB)], (FILE, FILE))
    index = replace(index, storages=(index.storages[0], replace(index.storages[1], file=1)))
    requests = [request(name, entry((16 * MIB,), storage=i), dtype="bfloat16") for i, name in enumerate("ab")]
    targets, _ = single_targets(requests, index, {})
    made = plan_load(targets, (FILE, FILE), machine, staging_bytes=1024 * MIB)
    assert made.staging_buffer_bytes == 16 * MIB
    longest = [max(read.nbytes for read in made.reads if read.file == file) for file in (0, 1)]
    assert 8 * MIB < longest[0] <= 16 * MIB
    assert longest[1] == MIB


def test_the_facts_of_a_source_reach_planning_through_every_wrapper() -> None:
    source = RecordingSource(MemorySource(bytes(100)))
    source.access = STORE
    wrapped: list[Source] = [source, ReadAhead(source), Section(source, 10, 50), RecordingSource(source)]
    assert [file_facts(one).access for one in wrapped] == [STORE] * 4
    machine = machine_facts([source, source, MemorySource(b"x")], read={0, 2})
    assert [known.access for known in machine.files] == [STORE, local_access(), local_access()]
    assert machine.access == STORE


def test_a_load_makes_the_requests_that_suit_its_source(tmp_path: Path) -> None:
    """The public verb reads the same file through a source with small requests that never span gaps."""
    sluice.save({f"w{i}": torch.ones(300_000) for i in range(3)}, tmp_path / "f.safetensors")

    def longest(access: AccessFacts | None) -> int:
        with sluice.open(tmp_path / "f.safetensors") as checkpoint:
            (source,) = record_reads(checkpoint)
            if access is not None:
                source.access = access
            state = sluice.load_state_dict(checkpoint)
            assert all(torch.equal(tensor, torch.ones(300_000)) for tensor in state.values())
            return max(read.nbytes for read in source.reads)

    assert longest(None) == 1_200_000
    assert longest(SLOW) <= MIB


@cache
def device_plan(*, cached: bool, cores: int, staging: int, dtype: str = "float32") -> LoadPlan:
    """Return the plan of 120 tensors of 36 MiB, for a device."""
    tensor = torch.empty(9 * MIB, device="meta")
    requests = [request(f"t{i}", entry_of(tensor, i), device="fake:0", dtype=dtype) for i in range(120)]
    storages = [(i * 36 * MIB, 36 * MIB) for i in range(120)]
    return planned(requests, storages, facts(cached=cached, cores=cores), staging=staging)


@pytest.mark.parametrize(("read_rate", "copy_rate"), [(1, 1), (1, 4), (4, 1)], ids=["1:1", "1:4", "4:1"])
@pytest.mark.parametrize("staging", [16 * MIB, 64 * MIB, pytest.param(256 * MIB, marks=pytest.mark.long)])
@pytest.mark.parametrize(("cached", "cores"), [(False, 2), (False, 16), (True, 2), (True, 16)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_the_slower_of_disk_and_device_never_waits_for_the_other(
    cached: bool, cores: int, staging: int, dtype: str, read_rate: int, copy_rate: int
) -> None:
    made = device_plan(cached=cached, cores=cores, staging=staging, dtype=dtype)
    assert made.staging_buffers * made.staging_buffer_bytes <= staging
    assert made.device_scratch_bytes <= max(made.staging_buffer_bytes + 2 * MIB, 10 * MIB)
    used = use_of_ring(made, read_rate=read_rate * 1e9, copy_rate=copy_rate * 1e9)
    # A reader that has only one buffer waits while the device copies from it: n of n + 1 parts of the time are left.
    most = min(made.readers, made.staging_buffers)
    assert used >= (0.96 * most / (most + 1) if made.staging_buffers <= made.readers else 0.95)


def test_the_model_shows_a_ring_of_one_buffer_as_too_small() -> None:
    made = replace(device_plan(cached=False, cores=2, staging=64 * MIB), staging_buffers=1, readers=1)
    assert use_of_ring(made, read_rate=1e9, copy_rate=1e9) == pytest.approx(0.5, abs=0.01)


REMOTE = AccessFacts(request_bytes=1000, gap_bytes=50, parallel_requests=4, joins_reads=True)


def files_with(*accesses: AccessFacts) -> list[FileFacts]:
    return [FileFacts(filesystem="", direct_io=False, probe_step_bytes=1, access=access) for access in accesses]


@st.composite
def reads(draw: st.DrawFn) -> list[Read]:
    made: list[Read] = []
    for file in range(draw(st.integers(1, 3))):
        offset = 0
        for _ in range(draw(st.integers(0, 12))):
            offset += draw(st.sampled_from([0, 0, 7, 50, 51]))
            nbytes = draw(st.sampled_from([1, 100, 450, 1000]))
            made.append(Read(file=file, offset=offset, nbytes=nbytes, methods=("buffered",)))
            offset += nbytes
    return made


@given(reads())
def test_requests_are_as_long_as_they_may_be(each: list[Read]) -> None:
    joined = list(join_requests(each, files_with(REMOTE, REMOTE, REMOTE)))
    assert [replace(read, continues=False) for read in joined] == each
    requests = list(requests_of(joined))
    for one in requests:
        assert len({read.file for read in one}) == 1
        gaps = [after.offset - read.offset - read.nbytes for read, after in itertools.pairwise(one)]
        assert all(gap <= 50 for gap in gaps)
        assert one[-1].offset + one[-1].nbytes - one[0].offset <= 1000
    for one, (after, *_) in itertools.pairwise(requests):
        gap = after.offset - one[-1].offset - one[-1].nbytes
        too_long = after.offset + after.nbytes - one[0].offset > 1000
        assert after.file != one[0].file or gap > 50 or too_long


@given(reads())
def test_reads_of_local_files_stay_apart(each: list[Read]) -> None:
    assert list(join_requests(each, files_with(local_access(), local_access(), local_access()))) == each
