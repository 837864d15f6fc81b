"""The units of a streamed model that pass through memory: which are read, kept and dropped.

The units of a block are read at once, and any other unit may be dropped for them. The units of later blocks are read
ahead as long as there is room, and take the place of units that are needed still later (the rule "do no harm" of Cao,
Felten, Karlin and Li, A Study of Integrated Prefetching and Caching Strategies, SIGMETRICS 1995). Of the units that are
not expected at all, such as experts, those that were used least are dropped first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress

from sluice._errors import SluiceError
from sluice.engine.host_memory import RecycledMemory
from sluice.engine.running_plan import SessionEndedError
from sluice.streaming.host_weights import HostWeights
from sluice.streaming.units import Unit

__all__ = ["Window"]


class Window:
    """Memory for units, in use or not; not safe for threads."""

    def __init__(self, units: Sequence[Unit], memory: RecycledMemory, host: HostWeights, *, most_bytes: int) -> None:
        """Read nothing yet.

        Args:
            units: All units.
            memory: What they are read into.
            host: Weights that rest in host memory.
            most_bytes: Bytes of the units that are in memory or being read at the same time.
        """
        self._units = units
        self._memory = memory
        self._host = host
        self._most_bytes = most_bytes
        self._expected: Mapping[int, int] = {}
        #: Units that are dropped only for those of a block that is called.
        self.kept = set[int]()
        #: Units in use, by position.
        self.used: dict[int, Unit] = {}
        self._held_bytes = 0
        #: Units that may be in memory or being read.
        self._held = set[int]()
        #: Bytes that were requested from the files, also by lookups of rows.
        self.read_bytes = 0
        #: Seconds in which the model waited for weights.
        self.waited_seconds = 0.0
        #: Uses of units that were in memory, or were being read already.
        self.hits = 0
        #: Uses of units that were not.
        self.misses = 0

    def acquire(self, number: int, *, install: bool = True) -> None:
        """Return when a unit is in memory, where it stays until it is released.

        Args:
            number: The unit.
            install: Whether to put its weights into the modules.
        """
        unit = self._units[number]
        if unit.users == 0:
            if unit.held:
                self.hits += 1
            else:
                self.misses += 1
                self._make_room(number, at_any_cost=True)
                self._start(number)
            began = time.perf_counter()
            try:
                self._finish(unit)
            finally:
                self.waited_seconds += time.perf_counter() - began
        if install:
            unit.install()
        self.used[number] = unit  # last, so that an interrupt leaves a stream that can be closed
        unit.users += 1
        unit.uses += 1

    def release(self, number: int, *, installed: bool = True) -> None:
        """Let a unit go: its weights leave the modules after the last call, and stay in memory for now."""
        unit = self._units[number]
        unit.users -= 1
        if unit.users == 0:
            del self.used[number]
        if installed:
            unit.park()

    @contextmanager
    def holding(self, number: int, *, install: bool = False) -> Iterator[None]:
        """Hold a unit in memory during the block; see ``acquire``."""
        self.acquire(number, install=install)
        try:
            yield
        finally:
            self.release(number, installed=install)

    def read_ahead(self, upcoming: Iterable[int]) -> None:
        """Begin to read units that are likely to be used next, in order, as far as there is room."""
        self._expected = {number: place for place, number in enumerate(dict.fromkeys(upcoming))}
        started = False
        for number in self._expected:
            unit = self._units[number]
            if not unit.held:
                if not self._make_room(number, keep_unexpected=started):
                    return
                self._start(number)
                started = True

    def clear(self) -> None:
        """Drop every unit and free all memory. The reader has ended, and no block is running."""
        for unit in self._units:
            unit.drop()
        self._held_bytes = 0
        self._held.clear()
        self._memory.clear()

    def _start(self, number: int) -> None:
        unit = self._units[number]
        self._held.add(number)
        missing_bytes = self._host.missing_bytes(unit.plan.prepared.plan.reads)  # before they are read
        unit.start()
        self._held_bytes += unit.nbytes
        self.read_bytes += missing_bytes

    def _finish(self, unit: Unit) -> None:
        if unit.ready:
            return
        try:
            unit.finish()
        finally:
            if not unit.held:
                self._held_bytes -= unit.nbytes

    def _make_room(self, number: int, *, at_any_cost: bool = False, keep_unexpected: bool = False) -> bool:
        """Drop units that are not in use until there is room for another one; return whether there is.

        Args:
            number: The unit that needs room.
            at_any_cost: Whether units are dropped that are needed before it.
            keep_unexpected: Whether units that are not expected at all, such as experts, are kept.
        """
        unit = self._units[number]
        earliest = -1 if at_any_cost else self._expected[number]
        latest = len(self._expected) if keep_unexpected else math.inf
        while self._held_bytes + unit.nbytes > self._most_bytes:
            found = self._least_needed(earliest, latest, frozenset() if at_any_cost else self.kept)
            if found is None:
                return False
            self._drop(found)
        return True

    def _least_needed(self, earliest: int, latest: float, kept: AbstractSet[int]) -> Unit | None:
        """Return the unit, not in use or kept, that is needed last of those needed from one place to another."""
        self._held = {number for number in self._held if self._units[number].held}
        places = {number: self._expected.get(number, math.inf) for number in sorted(self._held - kept)}

        def rank(number: int) -> tuple[bool, bool, float, int]:
            unit = self._units[number]
            return number not in self.kept, unit.ready, places[number], -unit.uses

        free = [i for i, place in places.items() if earliest < place <= latest and not self._units[i].users]
        return self._units[max(free, key=rank)] if free else None

    def _drop(self, unit: Unit) -> None:
        try:
            if not unit.ready:  # its reads have to end first; if they fail, no block needs them
                with suppress(SluiceError, SessionEndedError):
                    unit.settle()
        finally:  # also after an interrupt
            unit.drop()
            self._held_bytes -= unit.nbytes
