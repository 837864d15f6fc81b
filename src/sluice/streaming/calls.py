"""The calls of the blocks of a streamed model, and the units that are likely to be used next."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from sluice.streaming.job import StreamJob
from sluice.streaming.order import CallOrder

__all__ = ["Calls"]


class Calls:
    """The calls so far. Members of a list inside of a block are expected as long as none of them is skipped."""

    def __init__(self, job: StreamJob) -> None:
        self._job = job
        always = [i for i, block in enumerate(job.blocks) if job.uses[i] and not block.optional]
        self._order = CallOrder(always, len(job.blocks), returns=job.train)
        #: The first block that uses each unit.
        self.blocks = {unit: number for number, units in reversed([*enumerate(job.uses)]) for unit in units}
        self._counts = [0] * len(job.blocks)
        #: The blocks of the lists inside of each block, by the path of the list.
        self.lists: dict[int, dict[str, list[int]]] = {}
        for number, block in enumerate(job.blocks):
            if block.optional and block.parent is not None and job.uses[number]:  # others are not followed
                self.lists.setdefault(block.parent, {}).setdefault(block.group, []).append(number)
        #: Lists whose members were called equally often when the block around them was called last.
        self._regular: set[str] = set()

    def note(self, number: int) -> Iterator[int]:
        """Note that a block is called, and yield the units of lists of which a call skips members, as of experts."""
        self._order.note(number)
        for group, members in self.lists.get(number, {}).items():
            counts = {self._counts[member] for member in members}
            if len(counts) > 1:
                self._regular.discard(group)
                yield from chain.from_iterable(self._job.uses[member] for member in members)
            elif counts != {0}:
                self._regular.add(group)
        self._counts[number] += 1

    def note_part(self, number: int) -> None:
        """Note that weights of a block are used without a call of it."""
        self._order.note(number, part=True)

    def upcoming(self) -> Iterator[int]:
        """Yield the units that are likely to be used next, in order."""
        blocks = self._job.blocks
        for number in self._order.upcoming():
            if not blocks[number].optional or blocks[number].group in self._regular:
                yield from self._job.uses[number]
