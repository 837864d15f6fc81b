"""The result of a save or a conversion: the files that were written, or that a dry run would write."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluice._messages import listed
from sluice._public import public
from sluice._units import counted, format_bytes, format_rate, gb_per_second
from sluice.reports.document import Grid, Report, Section, Strong, cast_lines, checkpoint_title

if TYPE_CHECKING:
    from sluice.writing.contents import SavedFiles

__all__ = ["SaveReport"]


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(Report):
    """Result of ``sluice.save`` or ``sluice.convert``: the files and tensors that were written."""

    #: The file or directory, as given.
    destination: str
    #: Name of the format; see ``save``.
    format: str
    #: Paths of the files that were written; the index of a sharded model is the last.
    files: tuple[str, ...]
    #: Number of tensors that were given; tied names count each, although their tensor is stored once.
    tensors: int
    #: Number of tensor names of the source, or of the saved object, that are in the files.
    taken: int
    #: Number of tensor names of the source, or of the saved object.
    total: int
    #: Bytes of tensor data.
    nbytes: int
    #: Seconds from the call until everything was on the disk.
    seconds: float
    #: Names that are not stored because another name has the same tensor: ``{name: stored name}``.
    tied: Mapping[str, str]
    #: Path of the checkpoint that was converted; None for a save.
    source: str | None = None
    #: Name of its format.
    source_format: str = ""
    #: Dotted path of the part that was converted; None for the whole checkpoint.
    key: str | None = None
    #: Bytes of each of ``files``.
    file_bytes: tuple[int, ...]
    #: Bytes of tensor data that each rank of a process group wrote; empty if one process wrote all of it.
    written_by_rank: tuple[int, ...] = ()
    #: Existing files that were replaced or removed.
    replaced: tuple[str, ...] = ()
    #: Number of tensors for each change of dtype: ``{"float32 -> bfloat16": 148}``.
    casts: Mapping[str, int] = field(default_factory=dict)
    #: Remarks, such as what a conversion left out; one sentence each.
    notes: tuple[str, ...] = ()
    #: Whether nothing was written, because ``dry_run`` was requested.
    dry_run: bool = False

    @classmethod
    def of(cls, saved: SavedFiles, *, started: float, **fields: Any) -> SaveReport:
        """Return the report on written files; ``started`` is ``time.perf_counter()`` at the start of the call."""
        return cls(
            files=tuple(saved.files),
            file_bytes=tuple(saved.files.values()),
            tensors=saved.tensors,
            nbytes=saved.nbytes,
            tied=saved.tied,
            written_by_rank=saved.ranks,
            replaced=saved.replaced,
            casts=saved.casts,
            seconds=time.perf_counter() - started,
            **fields,
        )

    @property
    def gb_per_second(self) -> float:
        """Bytes of tensor data per second, in units of 10**9."""
        return gb_per_second(self.nbytes, self.seconds)

    def sections(self) -> Iterator[Section]:
        """Yield what was written, the files with their sizes, and what happened to names and dtypes."""
        count = f"{self.taken:,} of {counted(self.total, 'tensor')}"
        if self.source is not None:
            count += f" of {checkpoint_title(self.source, self.source_format, self.key)}"
        written = f"{count} to {checkpoint_title(self.destination, self.format)}, {format_bytes(self.nbytes)}"
        if self.dry_run:
            files = counted(len(self.files), "file")
            yield Strong(f"would write {written} in {files}; a dry run: nothing was written")
        else:
            yield Strong(f"wrote {written} in {format_rate(self.nbytes, self.seconds)}")
        sizes = zip(self.files, self.file_bytes, strict=True)
        yield Grid.first(("file", ">bytes"), ((file, f"{nbytes:,}") for file, nbytes in sizes), len(self.files))
        if self.written_by_rank:
            least, most = map(format_bytes, (min(self.written_by_rank), max(self.written_by_rank)))
            yield f"written by {counted(len(self.written_by_rank), 'rank')}, {least} to {most} each"
        yield from cast_lines(self.casts)
        if self.tied:
            yield listed("stored once", [f"{name} = {stored}" for name, stored in self.tied.items()])
        if self.replaced:
            yield listed("replaced", self.replaced)
        yield from (f"note: {note}" for note in self.notes)
