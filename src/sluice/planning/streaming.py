"""Decide what of a streamed model stays in memory, and how much memory the rest passes through.

The weights of a model are used in the same order in every call. On such a cyclic scan, memory that keeps what was used
last keeps nothing that is used again in time, so that a fixed set of units stays, as many bytes as fit, and the others
pass through a window that holds the units in use and those that are used next. Resident units are spread evenly over
the order: while one of them computes, the disk reads a unit after it.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

__all__ = ["Step", "Streaming", "choose_resting", "decide_streaming"]

#: Most sizes of units that are tried as the largest that is streamed.
_SIZES_TRIED = 64


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
    #: Bytes of the units that are read in each call that skips no step.
    passing_bytes: int
    #: Least memory for which there is a decision, in bytes.
    smallest_bytes: int
    #: Whether the window holds the units of a step while those of the next are read.
    reads_ahead: bool
    #: Whether it holds the next step too if that is optional.
    reads_all_ahead: bool
    #: Positions of units of optional steps that stay in the window as long as no such step is skipped.
    kept: frozenset[int] = frozenset()

    def fits(self, memory_bytes: int) -> bool:
        """Return whether ``memory_bytes`` are enough."""
        return self.smallest_bytes <= memory_bytes


def decide_streaming(sizes: Sequence[int], steps: Sequence[Step], *, fixed_bytes: int, memory_bytes: int) -> Streaming:
    """Return the decision that reads the fewest bytes for each call.

    If the memory is too small, the result is that for the smallest memory that is possible.

    Args:
        sizes: Bytes of the units: weights that are read together, and may be streamed. Those that no step uses are read
            in parts, and stay only if all do.
        steps: The order in which they are used.
        fixed_bytes: Bytes of the weights that always stay.
        memory_bytes: Bytes for all weights together.
    """
    model = _Model(sizes, steps, fixed_bytes)
    whole = _Model(sizes, [Step(units=step.units) for step in steps], fixed_bytes)
    candidates, everything = list(model.candidates()), fixed_bytes + sum(sizes)
    smallest = min(everything, *(model.needed(held, ahead=False) for held in candidates))
    memory_bytes = max(memory_bytes, smallest)
    if everything <= memory_bytes:
        return Streaming(
            resident=frozenset(range(len(sizes))),
            resident_bytes=everything,
            window_bytes=0,
            passing_bytes=0,
            smallest_bytes=smallest,
            reads_ahead=False,
            reads_all_ahead=True,
        )
    for judge, ahead in ((whole, True), (model, True), (model, False)):
        fitting = [held for held in candidates if judge.needed(held, ahead=ahead) <= memory_bytes]
        if fitting:
            break
    filled = fitting
    for _ in range(2):  # what stays needs no window
        filled = [model.filled(held, memory_bytes - judge.needed(held, ahead=ahead)) for held in filled]
    pairs = [(each, whole.filled(each, memory_bytes - whole.needed(each, ahead=ahead))) for each in filled]
    resident, held = max(pairs, key=lambda pair: whole.bytes_of(pair[1]))
    resident_bytes = fixed_bytes + model.bytes_of(resident)
    return Streaming(
        resident=resident,
        resident_bytes=resident_bytes,
        window_bytes=memory_bytes - resident_bytes,
        passing_bytes=model.bytes_of(frozenset().union(*(step.units for step in steps)) - held),
        smallest_bytes=smallest,
        reads_ahead=ahead,
        reads_all_ahead=ahead and judge is whole,
        kept=held - resident,
    )


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


class _Model(Struct, frozen=True):
    """The units of a model, and their use; see ``decide_streaming``."""

    sizes: Sequence[int]
    steps: Sequence[Step]
    fixed_bytes: int

    def candidates(self) -> Iterator[frozenset[int]]:
        """Yield sets of units that have to stay: all that are larger than the largest that is streamed."""
        whole = frozenset[int]().union(*(step.units for step in self.steps))
        for size in sorted({self.sizes[number] for number in whole} | {0}, reverse=True)[:_SIZES_TRIED]:
            yield frozenset(number for number in whole if self.sizes[number] > size)

    def needed(self, resident: frozenset[int], *, ahead: bool) -> int:
        """Return the bytes that are needed if these units stay: also those of the largest step.

        With ``ahead``, also those of a second streamed step.
        """
        streamed = [step for step in self.steps if step.units - resident]
        together = [step.units for step in streamed]
        if ahead:
            regular = [step.units for step in streamed if not step.optional]
            largest = max(regular, key=lambda units: self.bytes_of(units - resident), default=frozenset[int]())
            together += [largest | units for units in regular]  # which follow each other once those between stay
        window = max((self.bytes_of(used - resident) for used in together), default=0)
        return self.fixed_bytes + self.bytes_of(resident) + window

    def filled(self, held: frozenset[int], room: int) -> frozenset[int]:
        """Return a set of units that stay: ``held``, and others in these bytes, spread evenly."""
        regular = {number for step in self.steps if not step.optional for number in step.units}
        chosen = set(held)
        for number in _spread(sorted(regular - held)):
            if self.sizes[number] <= room:
                chosen.add(number)
                room -= self.sizes[number]
        return frozenset(chosen)

    def bytes_of(self, numbers: Iterable[int]) -> int:
        """Return the bytes of units."""
        return sum(self.sizes[number] for number in numbers)


def _spread(numbers: Sequence[int]) -> Iterator[int]:
    """Yield the numbers in an order whose every beginning is spread evenly (van der Corput's sequence)."""
    bits = max(1, (len(numbers) - 1).bit_length())
    for step in range(1 << bits):
        position = int(f"{step:0{bits}b}"[::-1], 2)
        if position < len(numbers):
            yield numbers[position]
