"""The explanation of a plan: how each group of tensors is read, staged and cast. Pure; no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from sluice._units import counted, format_bytes
from sluice.records import LoadPlan, Target
from sluice.reports.document import Grid, Report, Section
from sluice.reports.report_rows import how_filled

__all__ = ["Explanation", "TensorGroup", "explain"]

_HEADERS = (">tensors", ">bytes", "in the file", "finished", "device", "how")


class TensorGroup(Struct, frozen=True, kw_only=True):
    """Tensors that are moved the same way."""

    #: Number of tensors.
    tensors: int
    #: Bytes of the finished tensors.
    nbytes: int
    #: Their dtypes in the file; empty for tensors that are not in a file.
    file_dtype: str
    #: Their final dtype.
    dtype: str
    #: Their device, as torch writes it.
    device: str
    #: ``direct into place``, ``through staging``, ``cast``, ``mapped``, ``computed`` or ``empty``.
    how: str

    def cells(self) -> tuple[str, ...]:
        """Return the group as text."""
        return (
            f"{self.tensors:,}",
            format_bytes(self.nbytes),
            self.file_dtype or "-",
            self.dtype,
            self.device,
            self.how,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Report):
    """How a plan moves tensors. ``str()`` is aligned text, ``to_json()`` plain data, and rich prints it as a table.

    Example:
        >>> print(sluice.plan(model, "model.pth").explain())
    """

    #: Tensors that are moved the same way, the largest group first.
    groups: tuple[TensorGroup, ...]
    #: Number of reads.
    reads: int
    #: Bytes of all reads, including gaps between neighbours.
    read_bytes: int
    #: Number of reads by permitted methods, the preferred one first: ``{"direct or buffered": 12}``.
    methods: Mapping[str, int]
    #: Number of threads that read.
    readers: int
    #: Number of threads that copy out of staging; with 0 each reader copies what it read.
    copiers: int
    #: Number of staging buffers.
    staging_buffers: int
    #: Bytes of one staging buffer.
    staging_buffer_bytes: int
    #: Bytes that pass through staging.
    staged_bytes: int
    #: Whether buffered pages are dropped from the page cache after use.
    drop_behind: bool
    #: Reasons for the decisions, one sentence each.
    reasons: tuple[str, ...] = field(default=())

    def sections(self) -> Iterator[Section]:
        """Yield the groups, then the reads, staging and reasons."""
        yield Grid(_HEADERS, [group.cells() for group in self.groups])
        by = (
            counted(self.readers, "reader")
            if self.readers
            else "the caller's thread: no other fits next to the weights"
        )
        methods = "".join(f", {count:,} {how}" for how, count in self.methods.items())
        yield f"{counted(self.reads, 'read')}, {format_bytes(self.read_bytes)} in total, by {by}{methods}"
        held = self.staging_buffers * self.staging_buffer_bytes
        copiers = f", emptied by {counted(self.copiers, 'copier')}" if self.copiers else ""
        yield (
            f"staging: {format_bytes(self.staged_bytes)} pass through {counted(self.staging_buffers, 'buffer')} of "
            f"{format_bytes(self.staging_buffer_bytes)}, {format_bytes(held)} in total{copiers}"
            if held
            else "staging: none, every read goes to its final place"
        )
        if self.drop_behind:
            yield "file pages are dropped from the page cache after use"
        yield from self.reasons


def explain(plan: LoadPlan) -> Explanation:
    """Return how a plan moves each group of tensors."""
    members: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    in_place = {read.into for read in plan.reads}
    for position, target in enumerate(plan.targets):
        members[_kind(plan, position, target, in_place)].append(position)
    groups = [
        TensorGroup(
            tensors=len(positions),
            nbytes=sum(plan.targets[position].nbytes for position in positions),
            file_dtype=key[0],
            dtype=key[1],
            device=key[2],
            how=key[3],
        )
        for key, positions in members.items()
    ]
    return Explanation(
        groups=tuple(sorted(groups, key=lambda group: -group.nbytes)),
        reads=len(plan.reads),
        read_bytes=plan.read_bytes,
        methods=dict(Counter(" or ".join(read.methods) for read in plan.reads)),
        readers=plan.readers,
        copiers=plan.copiers,
        staging_buffers=plan.staging_buffers,
        staging_buffer_bytes=plan.staging_buffer_bytes,
        staged_bytes=sum(read.nbytes for read in plan.reads if read.into is None),
        drop_behind=plan.drop_behind,
        reasons=plan.reasons,
    )


def _kind(plan: LoadPlan, position: int, target: Target, in_place: set[int | None]) -> tuple[str, str, str, str]:
    dtypes = "+".join(dict.fromkeys(fill.dtype for fill in target.fills))
    computed = bool(target.nbytes) and not target.fills
    how = "computed" if computed else how_filled(plan, position, in_place, file_dtype=dtypes, dtype=target.dtype)
    return dtypes, target.dtype, target.device, how
