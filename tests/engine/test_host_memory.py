from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys

import pytest
import torch

from sluice._errors import BudgetError
from sluice.engine.host_memory import HostMemory
from sluice.engine.staging import StagingPool
from sluice.machine.peaks import read_memory

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
