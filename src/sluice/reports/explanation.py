"""What a plan does, group by group: which tensors are read how, through what, and into what. Pure; no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from sluice._dtypes import ITEM_BYTES
from sluice._units import format_bytes
from sluice.records import LoadPlan, Read, Target
from sluice.reports.table import aligned

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Explanation", "TensorGroup", "explain"]

_HEADERS = ("tensors", "bytes", "in the file", "finished", "device", "how", "reads", "bytes read", "methods")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Tensors that are moved in the same way."""

    #: Number of tensors.
    tensors: int
    #: Bytes of the finished tensors.
    nbytes: int
    #: Their dtypes in the file; empty for tensors that come from no file.
    file_dtype: str
    #: Their dtype when they are finished.
    dtype: str
    #: Their device, as torch writes it.
    device: str
    #: ``direct into place``, ``through staging``, ``cast``, ``mapped``, ``computed`` or ``empty``.
    how: str
    #: Reads that bring bytes of theirs; a read of neighbours counts in each of their groups.
    reads: int
    #: Bytes of the file that are theirs.
    read_bytes: int
    #: Permitted methods, the preferred first, for each way in which they are read, with the number of reads.
    methods: Mapping[str, int]

    def cells(self) -> tuple[str, ...]:
        """Return the group as text."""
        return (
            f"{self.tensors:,}",
            format_bytes(self.nbytes),
            self.file_dtype or "-",
            self.dtype,
            self.device,
            self.how,
            f"{self.reads:,}",
            format_bytes(self.read_bytes),
            ", ".join(f"{count:,} {how}" for how, count in self.methods.items()) or "-",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a plan does. ``str()`` is aligned text, ``to_json()`` plain data, and rich prints it as a table.

    Example:
        >>> print(sluice.plan(model, "model.pth").explain())
    """

    #: Tensors that are moved in the same way, the largest group first.
    groups: tuple[TensorGroup, ...]
    #: Number of reads.
    reads: int
    #: Bytes that they bring, the gaps between neighbours included.
    read_bytes: int
    #: Threads that read.
    readers: int
    #: Threads that copy out of staging what was read into it; with 0 each reader does it.
    copiers: int
    #: Number of staging buffers.
    staging_buffers: int
    #: Bytes of one.
    staging_buffer_bytes: int
    #: Bytes that pass through staging.
    staged_bytes: int
    #: Whether buffered pages are dropped from the page cache once they were used.
    drop_behind: bool
    #: Why the plan is as it is, a sentence each.
    reasons: tuple[str, ...] = field(default=())

    def lines(self) -> Iterator[str]:
        """Yield what is said beside the table, a sentence each."""
        by = f"{self.readers} readers" if self.readers else "the caller's thread: no other fits beside the weights"
        yield f"{self.reads:,} reads of {format_bytes(self.read_bytes)} in all, by {by}"
        held = self.staging_buffers * self.staging_buffer_bytes
        copiers = f", emptied by {self.copiers} copiers" if self.copiers else ""
        yield (
            f"staging: {format_bytes(self.staged_bytes)} pass through {self.staging_buffers} buffers of "
            f"{format_bytes(self.staging_buffer_bytes)}, {format_bytes(held)} in all{copiers}"
            if held
            else "staging: none, every read goes to its final place"
        )
        if self.drop_behind:
            yield "file pages are dropped from the page cache once they were used"
        yield from self.reasons

    def to_json(self) -> dict[str, object]:
        """Return everything as plain values that ``json.dumps`` takes."""
        return {**asdict(self), "groups": [asdict(group) for group in self.groups], "reasons": list(self.reasons)}

    def table(self) -> Table:
        """Return the groups as a rich table."""
        from rich.table import Table

        table = Table()
        for header in _HEADERS:
            table.add_column(
                header, justify="right" if header in {"tensors", "bytes", "reads", "bytes read"} else "left"
            )
        for group in self.groups:
            table.add_row(*group.cells())
        return table

    def __rich__(self) -> Table:
        table = self.table()
        table.caption = "\n".join(self.lines())
        table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        rows = aligned(_HEADERS, [group.cells() for group in self.groups])
        return "\n".join([*rows, *self.lines()])


def explain(plan: LoadPlan) -> Explanation:
    """Return what a plan does."""
    members: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    in_place = {read.into for read in plan.reads}
    for position, target in enumerate(plan.targets):
        members[_kind(plan, position, target, in_place)].append(position)
    group_of = {position: key for key, positions in members.items() for position in positions}
    reads: defaultdict[tuple[str, str, str, str], list[Read]] = defaultdict(list)
    nbytes: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    for read in plan.reads:
        found = _bytes_by_target(read)
        for key in dict.fromkeys(group_of[position] for position in found):
            reads[key].append(read)
        for position, count in found.items():
            nbytes[group_of[position]] += count
    groups = [
        TensorGroup(
            tensors=len(positions),
            nbytes=sum(plan.targets[position].nbytes for position in positions),
            file_dtype=key[0],
            dtype=key[1],
            device=key[2],
            how=key[3],
            reads=len(reads[key]),
            read_bytes=nbytes[key],
            methods=_methods(reads[key]),
        )
        for key, positions in members.items()
    ]
    return Explanation(
        groups=tuple(sorted(groups, key=lambda group: -group.nbytes)),
        reads=len(plan.reads),
        read_bytes=plan.read_bytes,
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
    kind = plan.blocks[position].kind
    if kind == "mapped":
        how = "mapped"
    elif target.nbytes == 0:
        how = "empty"
    elif not target.fills:
        how = "computed"
    elif dtypes != target.dtype:
        how = "cast"
    else:
        how = "direct into place" if position in in_place else "through staging"
    return dtypes, target.dtype, target.device, how


def _bytes_by_target(read: Read) -> dict[int, int]:
    """Return the bytes of a read by the target that they are for; what two targets view counts for both."""
    if read.into is not None:
        return {read.into: read.nbytes}
    found: dict[int, int] = {}
    for copy in read.copies:
        count = ITEM_BYTES[copy.dtype]
        for size in copy.shape:
            count *= size
        found[copy.target] = found.get(copy.target, 0) + count
    return found


def _methods(reads: Sequence[Read]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for read in reads:
        name = " or ".join(read.methods)
        counts[name] = counts.get(name, 0) + 1
    return counts
