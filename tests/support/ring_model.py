"""A model of the ring in virtual time: readers fill buffers at one rate, a device copies them out at another."""

from __future__ import annotations

import heapq

from msgspec import Struct

from sluice.records import LoadPlan


class RingUse(Struct, frozen=True, kw_only=True):
    """Result of the model; times are in the unit of the rates."""

    #: Time from the first read to the last copy.
    total: float
    #: Time that the disk would take alone.
    reading: float
    #: Time that the copies would take alone.
    copying: float

    @property
    def slower_busy(self) -> float:
        """Fraction of the time in which the slower of both works."""
        return max(self.reading, self.copying) / self.total


def use_of_ring(plan: LoadPlan, *, read_rate: float, copy_rate: float) -> RingUse:
    """Run the staged reads of a plan as the engine does, with bytes per unit of time for the disk and for copies.

    The disk has its full rate if as many requests are under way as readers and buffers allow. A copy starts when its
    read has ended and the copies before it are done. A buffer is lent again, oldest first, when its copy has read it.
    """
    readers = max(1, min(plan.readers, plan.staging_buffers))
    free_at = [0.0] * plan.staging_buffers  # when each free buffer can be written again, in the order of their return
    turns = [(0.0, reader) for reader in range(readers)]  # when each reader takes its next read
    heapq.heapify(turns)
    finished: list[tuple[float, int]] = []  # reads under way: end, bytes
    copies_end = reading = copying = 0.0
    pending = [read.nbytes for read in plan.reads if read.into is None]
    for nbytes in pending:
        now, reader = heapq.heappop(turns)
        while finished and (finished[0][0] <= now or not free_at):
            copies_end = _copy_out(heapq.heappop(finished), copies_end, copy_rate, free_at)
        start = max(now, free_at.pop(0))
        end = start + nbytes / (read_rate / readers)
        heapq.heappush(finished, (end, nbytes))
        heapq.heappush(turns, (end, reader))
        reading += nbytes / read_rate
        copying += nbytes / copy_rate
    while finished:
        copies_end = _copy_out(heapq.heappop(finished), copies_end, copy_rate, free_at)
    return RingUse(total=copies_end, reading=reading, copying=copying)


def _copy_out(read: tuple[float, int], copies_end: float, copy_rate: float, free_at: list[float]) -> float:
    end = max(read[0], copies_end) + read[1] / copy_rate
    free_at.append(end)
    return end
