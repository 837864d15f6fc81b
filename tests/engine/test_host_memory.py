from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
import time
from collections.abc import Callable

import pytest
import torch

from sluice._errors import BudgetError
from sluice.engine.host_memory import HostMemory, PageSizes
from sluice.engine.staging import StagingPool
from sluice.machine.processes import read_memory

MIB = 1 << 20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def address(memory: HostMemory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory.mapping, memory.start))


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 2 * MIB, 2 * MIB + 1, 7 * MIB + 123])
@pytest.mark.parametrize("huge_pages", [True, False])
def test_memory_is_aligned_and_not_larger_than_its_pages(nbytes: int, huge_pages: bool) -> None:
    memory = HostMemory(nbytes, huge_pages=huge_pages)
    assert nbytes <= memory.nbytes < nbytes + mmap.PAGESIZE
    assert len(memory.view()) == memory.nbytes
    assert address(memory) % 4096 == 0
    if huge_pages and nbytes >= 2 * MIB:
        assert address(memory) % (2 * MIB) == 0


@linux_only
def test_populated_memory_is_resident() -> None:
    memory = HostMemory(8 * MIB, huge_pages=False)
    before = read_memory().anon_bytes
    memory.populate()
    with contextlib.suppress(OSError):
        mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise(23)
        assert read_memory().anon_bytes - before > 7 * MIB  # the kernel has the advice


@linux_only
def test_a_touched_tail_does_not_make_a_whole_huge_page_resident() -> None:
    before = read_memory().anon_bytes
    memory = [HostMemory(2 * MIB + 4096, huge_pages=True) for _ in range(20)]
    for one in memory:
        one.view()[:: mmap.PAGESIZE] = bytes(len(one.view()[:: mmap.PAGESIZE]))
    assert read_memory().anon_bytes - before <= 20 * (2 * MIB + 4096) + 2 * MIB


@linux_only
def test_memory_goes_back_with_the_last_tensor_on_it() -> None:
    gc.collect()
    before = read_memory().anon_bytes
    memory = HostMemory(32 * MIB, huge_pages=True)
    tensor = torch.frombuffer(memory.mapping, dtype=torch.uint8, count=memory.nbytes, offset=memory.start)
    tensor.fill_(1)
    del memory
    assert read_memory().anon_bytes - before >= 30 * MIB
    del tensor
    assert read_memory().anon_bytes - before <= 2 * MIB


def test_refused_memory_is_a_memory_error() -> None:
    with pytest.raises(BudgetError, match="refused memory"):
        HostMemory(1 << 62, huge_pages=False)


def test_the_pool_lends_each_buffer_once_at_a_time() -> None:
    pool = StagingPool(buffer_bytes=8192, count=2, huge_pages=False)
    first, second = pool.borrow(), pool.borrow()
    first.view[:] = b"a" * 8192
    second.view[:] = b"b" * 8192
    assert bytes(first.view) == b"a" * 8192
    assert first.start != second.start
    pool.give_back(second)
    assert pool.borrow() is second


class Recorded(HostMemory):
    """Memory whose touches take the time that a function of the page returns."""

    __slots__ = ("clock", "seconds", "small", "touched")

    def __init__(self, nbytes: int, seconds: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(nbytes, huge_pages=True)
        self.touched: list[int] = []
        self.small: list[int] = []
        self.seconds = seconds
        self.clock = 0.0
        monkeypatch.setattr(time, "thread_time", lambda: self.clock)

    def populate_page(self, page: int) -> None:
        self.touched.append(page)
        self.clock += self.seconds(page)
        super().populate_page(page)

    def use_small_pages(self, pages: range) -> None:
        self.small += pages
        super().use_small_pages(pages)


def fill(memory: HostMemory, ranges: int, *, written: bool = True) -> None:
    """Choose and fill ranges of 8 MiB in order."""
    pages = PageSizes()
    for number in range(ranges):
        pages.choose(memory, number * 8 * MIB, 8 * MIB)
        if written:
            memory.view()[number * 8 * MIB : (number + 1) * 8 * MIB : 4096] = bytes(2048)


def test_slow_pages_end_huge_pages_for_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 1, 2, 4, 8, 16, 32, 64 and again 64 ranges of four pages without a touch one is tried."""
    monkeypatch.setattr(HostMemory, "populate_page", lambda *_: None)
    memory = Recorded(220 * 8 * MIB, lambda _: 0.005, monkeypatch)
    fill(memory, 220, written=False)
    assert [page // 4 for page in memory.touched] == [0, 2, 5, 10, 19, 36, 69, 134, 199]
    assert sorted(memory.touched + memory.small) == list(range(880))


def test_memory_that_the_host_has_taken_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page 6 is slow: the rest of its range and the next range get small pages, and then all are huge again."""
    memory = Recorded(64 * MIB, lambda page: 0.005 if page == 6 else 0.0004, monkeypatch)
    fill(memory, 8)
    assert memory.small == [7, 8, 9, 10, 11]
    assert memory.touched == [0, 1, 2, 3, 4, 5, 6, *range(12, 32)]


def test_fast_pages_shorten_the_pause_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges 0, 2 and 5 are slow, 10 and 11 fast: after 12, two ranges are left out, not the eight of four in a row."""
    monkeypatch.setattr(HostMemory, "populate_page", lambda *_: None)
    memory = Recorded(20 * 8 * MIB, lambda page: 0.005 if page // 4 in {0, 2, 5, 12} else 0.0, monkeypatch)
    fill(memory, 20, written=False)
    assert sorted({page // 4 for page in memory.touched}) == [0, 2, 5, 10, 11, 12, 15, 16, 17, 18, 19]


def test_a_page_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges overlap in their first and last page, and copies with gaps in more; a tail is on small pages anyway."""
    memory = Recorded(9 * MIB, lambda _: 0.0, monkeypatch)
    pages = PageSizes()
    pages.choose(memory, 100, 3 * MIB)
    pages.choose(memory, 3 * MIB, 2 * MIB)
    pages.choose(memory, 0, 9 * MIB)
    pages.choose(memory, 8 * MIB, MIB)
    assert memory.touched == [0, 1, 2, 3]


def test_a_touch_keeps_the_bytes_and_small_pages_can_be_filled() -> None:
    memory = HostMemory(8 * MIB, huge_pages=True)
    memory.view()[:4] = b"kept"
    memory.populate_page(0)
    memory.use_small_pages(range(1, 4))
    memory.view()[2 * MIB :] = bytes(6 * MIB)
    assert bytes(memory.view()[:4]) == b"kept"


def test_memory_without_huge_pages_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "thread_time", lambda: pytest.fail("timed"))
    PageSizes().choose(HostMemory(8 * MIB, huge_pages=False), 0, 8 * MIB)
    PageSizes().choose(HostMemory(MIB, huge_pages=True), 0, MIB)
