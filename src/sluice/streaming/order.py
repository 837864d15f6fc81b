"""The order in which blocks are called, and the calls that are likely to follow.

A model calls its blocks in the same order each time, or nearly so. What followed the last time that the same two blocks
were called one after the other is taken to follow again; before that, the order in which the model defines them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

__all__ = ["CallOrder"]


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
