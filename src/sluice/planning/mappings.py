"""Mapping plan of ``place="map"``: targets that are mapped pages of the files, and reasons why others are copied.

A target can be mapped if its bytes equal one contiguous range of a file: same dtype, same order of elements, on the
CPU, in memory that does not exist yet. One range of a file is mapped for each large target and for each group of small
neighbors. A single mapping of the whole file would keep written pages of a deleted module until its last tensor is
freed. One mapping per small tensor could exceed the limit of 65,530 mappings per process.

Targets that view the same bytes never share a range: each has private pages, so that writing to one does not change the
other, as with copies.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._units import format_bytes
from sluice.planning.reads import CollapsedFill, collapse_fill, is_verbatim
from sluice.records import Block, MappedRange, Target

__all__ = ["NOTHING_MAPPED", "Mapped", "plan_mapping"]


class Mapped(Struct, frozen=True, kw_only=True):
    """The mapped part of a plan."""

    #: Mapped ranges, in file order.
    ranges: tuple[MappedRange, ...] = ()
    #: Block of each mapped target, by the position of the target.
    blocks: Mapping[int, Block] = field(default_factory=dict)
    #: Amounts of mapped and copied bytes, and the reasons for copies, one sentence per item.
    reasons: tuple[str, ...] = ()


#: The mapping plan of ``place="copy"``.
NOTHING_MAPPED = Mapped()


def plan_mapping(targets: Sequence[Target], mappable: Sequence[bool]) -> Mapped:
    """Return the targets that are mapped, and their ranges.

    Args:
        targets: Final memory and its fills.
        mappable: One flag per file: whether the system can map it.
    """
    fills: list[CollapsedFill] = []
    copied: Counter[str] = Counter()
    copied_bytes = 0
    for position, target in enumerate(targets):
        if not target.fills:
            continue  # empty or computed
        why = _why_copied(target, mappable)
        if why is None:
            fills.append(collapse_fill(position, target.fills[0]))
        else:
            copied[why] += 1
            copied_bytes += target.nbytes
    fills.sort(key=lambda fill: (fill.fill.file, fill.piece.start_byte))
    ranges: list[MappedRange] = []
    blocks: dict[int, Block] = {}
    for group in _mapping_groups(fills):
        first = group[0]
        offset, end = first.piece.start_byte, max(fill.end for fill in group)
        for fill in group:
            at = fill.piece.start_byte - offset
            blocks[fill.target] = Block(kind="mapped", memory=len(ranges), offset=at)
        ranges.append(MappedRange(file=first.fill.file, offset=offset, nbytes=end - offset))
    return Mapped(ranges=tuple(ranges), blocks=blocks, reasons=tuple(_reasons(fills, copied, copied_bytes)))


def _why_copied(target: Target, mappable: Sequence[bool]) -> str | None:
    """Return why a target cannot be mapped, as text that follows a number of tensors; None if it can."""
    if target.existing:
        return "filled in place"
    if target.device != "cpu":
        return "on an accelerator"
    if target.finisher is not None:
        return "replaced by a finisher"
    if len(target.fills) != 1 or target.constants:
        return "assembled from parts"
    fill = target.fills[0]
    if fill.elements.arithmetic:
        return "computed"
    if fill.dtype != target.dtype:
        return "cast"
    if fill.elements.packing is not None:
        return "decoded"
    if not fill.elements.verbatim:
        return "in a different byte order, conjugated or negated in the file"
    collapsed = collapse_fill(0, fill)
    if not is_verbatim(target, collapsed) or collapsed.piece.nbytes != target.nbytes:
        return "in another order in the file"
    if fill.offset % ITEM_BYTES[fill.dtype]:
        return "at an offset that is not a multiple of the item size"
    return None if mappable[fill.file] else "in a file that the system cannot map"


def _mapping_groups(fills: Sequence[CollapsedFill]) -> list[list[CollapsedFill]]:
    """Divide fills in file order into groups that share a mapping, at most ``MAPPED_RANGES`` if possible."""
    limit_bytes = defaults.MAPPED_RANGE_BYTES
    while True:
        groups = _grouped(fills, limit_bytes)
        if len(groups) <= defaults.MAPPED_RANGES or limit_bytes > max(fill.end for fill in fills):
            return groups
        limit_bytes *= 4


def _grouped(fills: Sequence[CollapsedFill], limit_bytes: int) -> list[list[CollapsedFill]]:
    """Group consecutive fills of one file that do not overlap and span at most ``limit_bytes``."""
    groups: list[list[CollapsedFill]] = []
    for fill in fills:
        if groups:
            first, last = groups[-1][0], groups[-1][-1]
            apart = fill.fill.file != last.fill.file or fill.piece.start_byte < last.end
            if not apart and fill.end - first.piece.start_byte <= limit_bytes:
                groups[-1].append(fill)
                continue
        groups.append([fill])
    return groups


def _reasons(fills: Sequence[CollapsedFill], copied: Counter[str], copied_bytes: int) -> Iterator[str]:
    mapped_bytes = sum(fill.piece.nbytes for fill in fills)
    yield (
        f"place='map': {len(fills)} tensors, {format_bytes(mapped_bytes)}, are pages of the file, which are loaded and "
        "count as memory on first access"
    )
    if copied:
        reasons = ", ".join(f"{count} {why}" for why, count in copied.items())
        yield f"place='map': {copied.total()} tensors, {format_bytes(copied_bytes)}, are copied: {reasons}"
