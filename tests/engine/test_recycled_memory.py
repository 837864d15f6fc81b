"""Memory that is used again, within a bound."""

from __future__ import annotations

import torch

from sluice.engine.host_memory import HostMemory
from sluice.engine.recycled_memory import MemoryLease, RecycledMemory

MIB = 1 << 20


def test_memory_of_about_the_same_size_is_used_again() -> None:
    memory = RecycledMemory(8 * MIB, huge_pages=False)
    first = MemoryLease(memory)
    address = first.take(MIB - 5000).address
    first.give_back()
    assert MemoryLease(memory).take(MIB - 100).address == address
    assert memory.mapped_bytes == MIB


def test_memory_that_a_tensor_views_is_not_used_again() -> None:
    memory = RecycledMemory(8 * MIB, huge_pages=False)
    lease = MemoryLease(memory)
    taken: HostMemory | None = lease.take(MIB)
    assert taken is not None
    view = torch.frombuffer(taken.mapping, dtype=torch.uint8)[10:20]
    view.fill_(7)
    del taken
    lease.give_back()
    other = MemoryLease(memory).take(MIB)
    torch.frombuffer(other.mapping, dtype=torch.uint8).fill_(1)
    assert view.tolist() == [7] * 10
    assert memory.mapped_bytes == MIB  # the other mebibyte is the tensor's


def test_unused_memory_is_freed_before_the_bound_is_passed() -> None:
    memory = RecycledMemory(4 * MIB, huge_pages=False)
    lease = MemoryLease(memory)
    for size in (MIB, MIB, 2 * MIB):
        lease.take(size)
    lease.give_back()
    assert memory.mapped_bytes == 4 * MIB
    MemoryLease(memory).take(3 * MIB)
    assert memory.mapped_bytes <= 4 * MIB
    memory.clear()
    assert memory.mapped_bytes == 3 * MIB
