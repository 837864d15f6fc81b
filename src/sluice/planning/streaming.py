"""Decide what of a streamed model stays in memory, and how much memory the rest passes through.

The weights of a model are used in the same order in every call. On such a cyclic scan, memory that keeps what was used
last keeps nothing that is used again in time, so that a fixed set of units stays, as many bytes as fit, and the others
pass through a window that holds the units in use and those that are used next. Resident units are spread evenly over
the order: while one of them computes, the disk reads a unit after it.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from msgspec import Struct

__all__ = ["Step", "StreamedUnit", "Streaming", "choose_resting", "decide_streaming"]

#: Most sizes of units that are tried as the largest that is streamed.
_SIZES_TRIED = 64


class StreamedUnit(Struct, frozen=True, kw_only=True):
    """Weights that are read together."""

    #: Name for messages: the module that uses them.
    name: str
    #: Bytes in memory.
    nbytes: int


class Step(Struct, frozen=True, kw_only=True):
    """One part of a call of the model, in the order in which the model defines its modules."""

    #: Positions of the units that it uses at the same time.
    units: frozenset[int]
    #: Whether the model may skip it, as it skips most experts.
    optional: bool = False


class Streaming(Struct, frozen=True, kw_only=True):
    """A decision: the units that stay in memory, and memory for the others."""

    #: Positions of the units that stay.
    resident: frozenset[int]
    #: Bytes of these units and of everything else that stays.
    resident_bytes: int
    #: Bytes for the units that pass through.
    window_bytes: int
    #: Least memory for which there is a decision, in bytes.
    smallest_bytes: int
    #: Whether the window holds the units of a step while those of the next are read.
    reads_ahead: bool
    #: Positions of units of optional steps that stay in the window as long as no such step is skipped.
    kept: frozenset[int] = frozenset()

    def fits(self, memory_bytes: int) -> bool:
        """Return whether ``memory_bytes`` are enough."""
        return self.smallest_bytes <= memory_bytes


def decide_streaming(
    units: Sequence[StreamedUnit], steps: Sequence[Step], *, fixed_bytes: int, memory_bytes: int
) -> Streaming:
    """Return the decision that reads the fewest bytes for each call.

    If the memory is too small, the result is that for the smallest memory that is possible.

    Args:
        units: The weights that may be streamed. Those that no step uses are read in parts, and stay only if all do.
        steps: The order in which they are used.
        fixed_bytes: Bytes of the weights that always stay.
        memory_bytes: Bytes for all weights together.
    """
    total = sum(unit.nbytes for unit in units)
    if fixed_bytes + total <= memory_bytes:
        everything = frozenset(range(len(units)))
        smallest = min(_needed(units, steps, held, fixed_bytes, ahead=False) for held in _candidates(units, steps))
        return Streaming(
            resident=everything,
            resident_bytes=fixed_bytes + total,
            window_bytes=0,
            smallest_bytes=min(smallest, fixed_bytes + total),
            reads_ahead=False,
        )
    candidates = list(_candidates(units, steps))
    smallest = min(_needed(units, steps, held, fixed_bytes, ahead=False) for held in candidates)
    memory_bytes = max(memory_bytes, smallest)
    for ahead in (True, False):
        fitting = [
            _fill(units, steps, held, fixed_bytes, memory_bytes, ahead=ahead)
            for held in candidates
            if _needed(units, steps, held, fixed_bytes, ahead=ahead) <= memory_bytes
        ]
        if fitting:
            resident = max(fitting, key=lambda held: _bytes(units, held))
            resident_bytes = fixed_bytes + _bytes(units, resident)
            always = [Step(units=step.units) for step in steps]
            return Streaming(
                resident=resident,
                resident_bytes=resident_bytes,
                window_bytes=memory_bytes - resident_bytes,
                smallest_bytes=smallest,
                reads_ahead=ahead,
                kept=_fill(units, always, resident, fixed_bytes, memory_bytes, ahead=ahead) - resident,
            )
    raise AssertionError("the smallest memory fits by its definition")


def choose_resting(sizes: Sequence[int], memory_bytes: int) -> frozenset[int]:
    """Return the positions of the streamed units that rest in host memory: as many bytes as fit, spread evenly.

    While one of them is copied to the device, the disk reads a unit after it.

    Args:
        sizes: Bytes that each unit takes.
        memory_bytes: Bytes for all of them.
    """
    chosen = set[int]()
    for number in _spread(range(len(sizes))):
        if sizes[number] <= memory_bytes:
            chosen.add(number)
            memory_bytes -= sizes[number]
    return frozenset(chosen)


def _candidates(units: Sequence[StreamedUnit], steps: Sequence[Step]) -> Iterator[frozenset[int]]:
    """Yield sets of units that have to stay: all that are larger than the largest that is streamed."""
    whole = frozenset[int]().union(*(step.units for step in steps))
    for size in sorted({units[number].nbytes for number in whole} | {0}, reverse=True)[:_SIZES_TRIED]:
        yield frozenset(number for number in whole if units[number].nbytes > size)


def _needed(
    units: Sequence[StreamedUnit], steps: Sequence[Step], resident: frozenset[int], fixed_bytes: int, *, ahead: bool
) -> int:
    """Return the bytes that are needed if these units stay."""
    return fixed_bytes + _bytes(units, resident) + _window(units, steps, resident, ahead=ahead)


def _window(units: Sequence[StreamedUnit], steps: Sequence[Step], resident: frozenset[int], *, ahead: bool) -> int:
    """Return the bytes of the largest step, with those of the next streamed one if units are read ahead."""
    streamed = [step for step in steps if step.units - resident]
    together = [step.units for step in streamed]
    if ahead:
        regular = [step.units for step in streamed if not step.optional]
        together += [one | other for one, other in pairwise([*regular, *regular[:1]])]
    return max((_bytes(units, used - resident) for used in together), default=0)


def _fill(
    units: Sequence[StreamedUnit],
    steps: Sequence[Step],
    held: frozenset[int],
    fixed_bytes: int,
    memory_bytes: int,
    *,
    ahead: bool,
) -> frozenset[int]:
    """Return a set of units that stay: ``held``, and others as long as there is room, spread evenly."""
    room = memory_bytes - _needed(units, steps, held, fixed_bytes, ahead=ahead)
    regular = {number for step in steps if not step.optional for number in step.units}
    chosen = set(held)
    for number in _spread(sorted(regular - held)):
        if units[number].nbytes <= room:
            chosen.add(number)
            room -= units[number].nbytes
    return frozenset(chosen)


def _spread(numbers: Sequence[int]) -> Iterator[int]:
    """Yield the numbers in an order whose every beginning is spread evenly (van der Corput's sequence)."""
    bits = max(1, (len(numbers) - 1).bit_length())
    for step in range(1 << bits):
        position = int(f"{step:0{bits}b}"[::-1], 2)
        if position < len(numbers):
            yield numbers[position]


def _bytes(units: Sequence[StreamedUnit], numbers: Iterable[int]) -> int:
    return sum(units[number].nbytes for number in numbers)
