"""Which targets are pages of the files themselves (``place="map"``), and why the others are not. Pure; no torch.

A target can be mapped when it is what one run of the file's bytes says: same dtype, same order of elements, on the
CPU, in memory that does not exist yet. A range of a file is mapped for each large target and for each run of small
neighbours. Not one for the whole file: pages of a deleted module that were written to would stay until the last
tensor dies. Not one for each small tensor: a mapping is a kernel object, and a process may have 65,530.

Targets that view the same bytes never share a range. Each has private pages of its own, so that writing to one does
not change the other, as if both had been copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES
from sluice._units import format_bytes
from sluice.planning.reads import Run, as_run, is_verbatim
from sluice.records import Block, MappedRange, Target

__all__ = ["NOTHING_MAPPED", "Mapped", "plan_mapping"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """The part of a plan that is mapped."""

    #: What is mapped, in file order.
    ranges: tuple[MappedRange, ...] = ()
    #: The block of each target that is pages of a file, by its position.
    blocks: Mapping[int, Block] = field(default_factory=dict)
    #: How much is mapped, and how much is copied for which reasons, a sentence each.
    reasons: tuple[str, ...] = ()


#: What ``place="copy"`` maps.
NOTHING_MAPPED = Mapped()


def plan_mapping(targets: Sequence[Target], mappable: Sequence[bool]) -> Mapped:
    """Return which targets are mapped, and where.

    Args:
        targets: Final memory and its fills.
        mappable: For each file whether the system can map it.
    """
    runs: list[Run] = []
    copied: Counter[str] = Counter()
    copied_bytes = 0
    for position, target in enumerate(targets):
        if not target.fills:
            continue  # empty, or computed
        why = _why_copied(target, mappable)
        if why is None:
            runs.append(as_run(position, target.fills[0]))
        else:
            copied[why] += 1
            copied_bytes += target.nbytes
    runs.sort(key=lambda run: (run.fill.file, run.piece.start_byte))
    ranges: list[MappedRange] = []
    blocks: dict[int, Block] = {}
    for group in _neighbours(runs):
        first = group[0]
        offset, end = first.piece.start_byte, max(run.end for run in group)
        for run in group:
            at = run.piece.start_byte - offset
            blocks[run.target] = Block(kind="mapped", mapped_range=len(ranges), mapped_offset=at)
        ranges.append(MappedRange(file=first.fill.file, offset=offset, nbytes=end - offset))
    return Mapped(ranges=tuple(ranges), blocks=blocks, reasons=tuple(_sentences(runs, copied, copied_bytes)))


def _why_copied(target: Target, mappable: Sequence[bool]) -> str | None:
    """Return why a target cannot be pages of the file, in words that follow a number of tensors; None if it can."""
    if target.existing:
        return "filled in place"
    if target.device != "cpu":
        return "on an accelerator"
    if len(target.fills) != 1 or target.constants:
        return "assembled from parts"
    fill = target.fills[0]
    if fill.elements.factors:
        return "multiplied"
    if fill.dtype != target.dtype:
        return "cast"
    if fill.elements.swap_bytes or fill.elements.math_bits or fill.elements.kernel:
        return "of another byte order, conjugated or negated in the file"
    run = as_run(0, fill)
    if not is_verbatim(target, run) or run.piece.nbytes != target.nbytes:
        return "in another order in the file"
    if fill.offset % ITEM_BYTES[fill.dtype]:
        return "at an offset that is no multiple of the item size"
    return None if mappable[fill.file] else "in a file that the system cannot map"


def _neighbours(runs: Sequence[Run]) -> list[list[Run]]:
    """Split runs in file order into those that are mapped together."""
    limit_bytes = options.MAPPED_RANGE_BYTES
    while True:
        groups = _within(runs, limit_bytes)
        if len(groups) <= options.MAPPED_RANGES or limit_bytes > max(run.end for run in runs):
            return groups
        limit_bytes *= 4


def _within(runs: Sequence[Run], limit_bytes: int) -> list[list[Run]]:
    """Join runs that lie in one file, do not overlap, and span at most ``limit_bytes``."""
    groups: list[list[Run]] = []
    for run in runs:
        if groups:
            first, last = groups[-1][0], groups[-1][-1]
            apart = run.fill.file != last.fill.file or run.piece.start_byte < last.end
            if not apart and run.end - first.piece.start_byte <= limit_bytes:
                groups[-1].append(run)
                continue
        groups.append([run])
    return groups


def _sentences(runs: Sequence[Run], copied: Counter[str], copied_bytes: int) -> Iterator[str]:
    mapped_bytes = sum(run.piece.nbytes for run in runs)
    yield (
        f"place='map': {len(runs)} tensors, {format_bytes(mapped_bytes)}, are pages of the file: they are loaded, and "
        "count as memory, when they are first touched"
    )
    if copied:
        reasons = ", ".join(f"{count} {why}" for why, count in copied.items())
        yield f"place='map': {copied.total()} tensors, {format_bytes(copied_bytes)}, are copied: {reasons}"
