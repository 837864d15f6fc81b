"""The result of a dry run, on one rank or on many: what a load would read and need, next to the usual ways to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice._errors import Alternative
from sluice._public import public
from sluice._units import counted, format_bytes
from sluice.planning.budget import MemoryLimit
from sluice.planning.other_methods import MethodVerdict
from sluice.reports.document import Grid, Report, Section, Strong, cast_lines, plain_fields
from sluice.reports.load import LoadFigures
from sluice.reports.stream import StreamPlan

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["PlanReport", "RankLoad", "RanksPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """The load of one rank."""

    #: Number of the rank.
    rank: int
    #: Its position in the mesh.
    coordinate: tuple[int, ...]
    #: Number of its host.
    host: int
    #: Bytes of the finished tensors that it holds.
    final_bytes: int
    #: Bytes that it reads, if every rank reads for itself.
    read_bytes: int
    #: Number of these reads; requests, if the files are objects in a store.
    reads: int
    #: Predicted growth of its memory.
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPlan(Report):
    """A load on the ranks of a mesh, planned in one process: ``sluice.plan(..., mesh=...).ranks``.

    Example:
        >>> plan = sluice.plan(model, "model.pth", mesh={"dp": 4}, ranks_per_host=2)
        >>> print(plan.ranks.needed_bytes <= plan.ranks.read_bytes)
        True
    """

    _properties = ("read_bytes",)

    #: Ranks along each dimension of the mesh.
    mesh: Mapping[str, int]
    #: One for each rank, in the order of ranks.
    ranks: tuple[RankLoad, ...]
    #: Bytes of the files that at least one rank needs.
    needed_bytes: int

    @property
    def read_bytes(self) -> int:
        """Bytes that all ranks read, if each reads for itself."""
        return sum(rank.read_bytes for rank in self.ranks)

    @property
    def fullest(self) -> RankLoad:
        """The rank whose memory grows most."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    def sections(self) -> Iterator[Section]:
        """Yield what ranks hold and read."""
        held = [rank.final_bytes for rank in self.ranks]
        shape = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        yield (
            f"{counted(len(self.ranks), 'rank')} ({shape}) on {counted(self.ranks[-1].host + 1, 'host')}: each holds "
            f"{format_bytes(min(held))} to {format_bytes(max(held))}; the fullest, rank {self.fullest.rank}, grows by "
            f"at most {format_bytes(self.fullest.peak_bytes)}"
        )
        times = self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0
        yield (
            f"all ranks need {format_bytes(self.needed_bytes)} of the files; if each reads for itself, they read "
            f"{format_bytes(self.read_bytes)}, {times:.2f} times as much"
        )


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport(LoadFigures):
    """Result of a dry run: the reads, placement and memory of a load. Nothing was read and nothing was changed.

    ``str(report)`` is a summary to read, ``report.to_json()`` the complete record for programs, and
    ``report.table()`` compares the ways to load.

    Example:
        >>> report = sluice.plan(model, "model.pth", dtype=torch.bfloat16)
        >>> if not report.fits:
        ...     print(report.shortages, [str(each) for each in report.alternatives])
    """

    #: Bytes of tensor data in the checkpoint, including data that the load does not need.
    checkpoint_bytes: int
    #: Bytes of the staging buffers.
    staging_bytes: int
    #: Predicted growth of the memory reserved by the allocator of each accelerator, in bytes.
    device_bytes: Mapping[str, int]
    #: Limits on the growth of memory, each with its origin.
    limits: tuple[MemoryLimit, ...]
    #: Limits that are exceeded, one sentence per limit; empty if the load fits.
    shortages: tuple[str, ...] = ()
    #: Changed arguments that would fit; empty if the load fits.
    alternatives: tuple[Alternative, ...] = ()
    #: Needs of sluice and of the usual ways to load, counted from before the model exists.
    methods: tuple[MethodVerdict, ...]
    #: The recommended method; None if nothing fits.
    recommended: str | None
    #: The reason for the recommendation.
    reason: str
    #: The loads of all ranks of a mesh, of which the other fields describe the fullest; None without a mesh.
    ranks: RanksPlan | None = None
    #: The model as a stream; None unless it was requested.
    stream: StreamPlan | None = None

    @property
    def fits(self) -> bool:
        """Whether every limit can be kept: ``load_into`` with the same arguments would not raise ``BudgetError``."""
        return not self.shortages

    def to_json(self) -> dict[str, object]:
        """Return every field, and ``fits``, as plain values that ``json.dumps`` takes."""
        return {
            **plain_fields(self),
            "alternatives": [{"change": each.change, "needs": dict(each.needs)} for each in self.alternatives],
            "methods": [{**plain_fields(each), "possible": each.possible} for each in self.methods],
            "fits": self.fits,
        }

    def _methods(self) -> Grid:
        headers = ("method", ">host peak", ">anonymous", ">file pages", *(f">{device}" for device in self.device_bytes))
        rows = [
            (
                each.method,
                *map(format_bytes, (each.host.total_bytes, each.host.anon_bytes, each.host.file_bytes)),
                *(format_bytes(each.devices.get(device, 0)) for device in self.device_bytes),
                "yes" if each.fits else "no",
                "; ".join(filter(None, (each.remark, each.needs))),
            )
            for each in self.methods
        ]
        recommended = [position for position, each in enumerate(self.methods) if each.method == self.recommended]
        return Grid((*headers, "fits", "remark"), rows, strong=recommended[0] if recommended else None)

    def table(self) -> Table:
        """Return the comparison of the ways to load as a rich table."""
        return self._methods().rich()

    def sections(self) -> Iterator[Section]:
        """Yield the summary, names that do not match, the comparison of the ways to load, and the recommendation."""
        yield Strong(
            self.title("would load")
            + (f" finished on {', '.join(self.devices)}" if self.loaded else "")
            + f", {format_bytes(self.read_bytes)} to read"
            + (f", {format_bytes(self.mapped_bytes)} to map" if self.mapped_bytes else "")
        )
        if self.remote is not None:
            yield self.remote.describe()
        yield from cast_lines(self.cast)
        yield from (each.describe() for each in self.adapters)
        grown = {"host": self.predicted.total_bytes, **self.device_bytes}
        yield "predicted growth: at most " + ", ".join(
            f"{format_bytes(n)} of {where} memory" for where, n in grown.items()
        )
        for limit in self.limits:
            yield f"limit of {limit.where}: {format_bytes(limit.nbytes)} ({limit.origin})"
        yield from self.shortages
        yield from (f"would fit: {each}" for each in self.alternatives)
        yield from self.unmatched()
        if self.ranks is not None:
            yield from self.ranks.sections()
        if self.stream is not None:
            yield from self.stream.sections()
        yield self._methods()
        yield Strong(f"recommended: {self.recommended or 'none'}, because {self.reason}")
        yield from (f"note: {note}" for note in self.notes)
