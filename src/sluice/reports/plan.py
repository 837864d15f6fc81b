"""The result of a dry run: what a load would read and need, next to the usual ways to load. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice._errors import Alternative
from sluice._public import public
from sluice._units import format_bytes
from sluice.planning.budget import MemoryLimit
from sluice.planning.other_methods import MethodVerdict
from sluice.reports.document import Grid, Section, Strong, cast_lines, plain_fields
from sluice.reports.load_figures import LoadFigures
from sluice.reports.ranks import RanksPlan
from sluice.reports.stream import StreamPlan

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["PlanReport"]


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
