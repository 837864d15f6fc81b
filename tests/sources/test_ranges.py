"""Small ranges of a file: the right bytes, in few reads, with any number of threads."""

from __future__ import annotations

import itertools
import random
import resource
import threading
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._errors import TruncatedError
from sluice.sources.ranges import read_ranges
from support.sources import MemorySource, RecordingSource
from support.watching import watch

CONTENT = random.Random(0).randbytes(100_000)


@given(
    st.lists(st.tuples(st.integers(0, 9_000), st.integers(1, 90)), max_size=30),
    st.integers(0, 5_000),
)
def test_any_ranges(steps: list[tuple[int, int]], gap_bytes: int) -> None:
    starts, sizes, end = [], [], 0
    for skipped, size in steps:
        if end + skipped + size <= len(CONTENT):
            starts.append(end + skipped)
            sizes.append(size)
            end += skipped + size
    source = RecordingSource(MemorySource(CONTENT))
    expected = [CONTENT[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert read_ranges(source, starts, sizes, gap_bytes=gap_bytes) == expected
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    distant = sum(start - end > gap_bytes for start, end in zip(starts[1:], ends[:-1], strict=True))
    assert len(source.reads) == (distant + 1 if starts else 0)


def test_no_read_is_long() -> None:
    source = RecordingSource(MemorySource(bytes(5 << 20)))
    starts = list(range(0, 5 << 20, 1000))
    assert read_ranges(source, starts, [8] * len(starts)) == [bytes(8)] * len(starts)
    assert len(source.reads) == 5
    assert max(read.nbytes for read in source.reads) <= 1 << 20


@pytest.mark.parametrize("distance", [10, 3_000])
def test_the_end_of_the_file(distance: int) -> None:
    starts = [len(CONTENT) - 7 - distance * number for number in reversed(range(20))]
    with pytest.raises(TruncatedError):
        read_ranges(MemorySource(CONTENT), starts, [8] * 20, gap_bytes=100)


@pytest.fixture
def address_space() -> Iterator[None]:
    """A high limit on virtual memory."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (8 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Read ranges that are far apart; return the name of the thread of each read."""
    names: list[str] = []
    watch(monkeypatch, MemorySource, "read_at", lambda *_: names.append(threading.current_thread().name))
    starts = list(range(0, 90_000, 3_000))
    found = read_ranges(MemorySource(CONTENT), starts, [8] * 30, gap_bytes=100)
    assert found == [CONTENT[start : start + 8] for start in starts]
    return names


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each look at the clock, of which there is one for each read, find that a millisecond has passed."""
    seconds = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds) / 1000)


@pytest.mark.usefixtures("slow_clock")
def test_several_threads_read_after_the_caller_has_waited_for_the_first_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = readers(monkeypatch)
    assert first == threading.current_thread().name
    assert all(name.startswith("sluice-headers") for name in others)
    assert len(others) == 29


def test_only_the_caller_reads_what_arrives_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    assert set(readers(monkeypatch)) == {threading.current_thread().name}


@pytest.mark.usefixtures("address_space", "slow_clock")
def test_under_a_limit_on_virtual_memory_only_the_caller_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's stack and malloc arena count against the limit, and the weights need that memory."""
    assert set(readers(monkeypatch)) == {threading.current_thread().name}
