"""The calls of the blocks of a streamed model, and the units that are likely to be used next.

A model calls its blocks in the same order each time, or nearly so. What followed the last time that the same two blocks
were called one after the other is taken to follow again; before that, the order in which the model defines them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from sluice.streaming.job import StreamJob

__all__ = ["CallOrder", "Calls"]


class CallOrder:
    """The calls of blocks, by their positions."""

    def __init__(self, defined: Sequence[int], blocks: int, *, returns: bool = False) -> None:
        """Know the order in which the model defines the blocks that every call needs.

        Args:
            defined: These blocks, in this order.
            blocks: Number of all blocks.
            returns: Whether a backward pass, against the order, is likely to follow.
        """
        self._returns = returns
        self._defined = tuple(defined)
        self._place = {block: place for place, block in enumerate(self._defined)}
        #: Most calls that are expected: a whole call of the model and, if it follows, a backward pass.
        self._most = max(16, 2 * blocks if returns else blocks)
        self._calls: deque[int] = deque(maxlen=max(16, 8 * blocks))
        #: Number of all calls, of which ``_calls`` has the last.
        self._number = 0
        #: Number of the last call of the second block of a pair, by pair; older ones than ``_calls`` may be left out.
        self._last: dict[tuple[int, int], int] = {}
        self._found: int | None = None
        #: Number of the last call that was a use of weights, as by a backward pass.
        self._last_part = -2

    def note(self, block: int, *, part: bool = False) -> None:
        """Note that a block is called, or that a part of its weights is used without a call."""
        if part:
            self._last_part = self._number
        if self._calls:
            pair = (self._calls[-1], block)
            self._found = self._last.get(pair)
            self._last[pair] = self._number
            if len(self._last) > 2 * len(self._calls):
                oldest = self._number - len(self._calls)
                self._last = {each: number for each, number in self._last.items() if number >= oldest}
        self._calls.append(block)
        self._number += 1

    def upcoming(self) -> Iterator[int]:
        """Yield the blocks that are likely to be called next, in order."""
        oldest = self._number - len(self._calls)
        if self._found is not None and self._found >= oldest:
            first = self._found - oldest + 1
            yield from islice(self._calls, first, first + self._most)
        elif self._defined:
            recent = (self._place.get(call, -1) for call in islice(reversed(self._calls), 2))
            place, before = (*recent, -1, -2)[:2]
            turned = self._returns and self._number > len(self._defined)  # after a whole forward pass
            if before >= place and (turned or self._number - self._last_part <= 2):  # against the order
                yield from reversed(self._defined[: max(0, place)])
                place = -1
            elif before >= 0:  # passed over, as by a norm that is defined last and called first
                yield from self._defined[before + 1 : place]
            yield from self._defined[place + 1 :]
            yield from reversed(self._defined) if self._returns and place >= 0 else self._defined[: place + 1]


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
