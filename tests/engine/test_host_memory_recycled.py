"""Memory that is used again, within a bound."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from sluice.engine.host_memory import RecycledMemory

MIB = 1 << 20


def test_memory_of_about_the_same_size_is_used_again() -> None:
    memory = RecycledMemory(8 * MIB, huge_pages=False)
    first = [memory.take(MIB - 5000)]
    address = first[0].address
    memory.give_back(first)
    assert memory.take(MIB - 100).address == address
    assert memory.mapped_bytes == MIB


def test_memory_that_a_tensor_views_is_not_used_again() -> None:
    memory = RecycledMemory(8 * MIB, huge_pages=False)
    taken = [memory.take(MIB)]
    view = torch.frombuffer(taken[0].mapping, dtype=torch.uint8)[10:20]
    view.fill_(7)
    memory.give_back(taken)
    other = memory.take(MIB)
    torch.frombuffer(other.mapping, dtype=torch.uint8).fill_(1)
    assert view.tolist() == [7] * 10
    assert memory.mapped_bytes == MIB  # the other mebibyte is the tensor's


def test_memory_that_the_system_refuses_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RecycledMemory(8 * MIB, huge_pages=False)
    monkeypatch.setattr("sluice.engine.host_memory.HostMemory", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        memory.take(MIB)
    assert memory.mapped_bytes == 0


def test_unused_memory_is_freed_before_the_bound_is_passed() -> None:
    memory = RecycledMemory(4 * MIB, huge_pages=False)
    memory.give_back([memory.take(size) for size in (MIB, MIB, 2 * MIB)])
    assert memory.mapped_bytes == 4 * MIB
    taken = memory.take(3 * MIB)
    assert memory.mapped_bytes <= 4 * MIB
    memory.clear()
    assert memory.mapped_bytes == taken.nbytes
