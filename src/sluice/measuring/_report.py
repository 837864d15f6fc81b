"""The result of ``sluice.measure``: figures, a timeline, a table, a picture."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluice._public import public
from sluice._units import format_bytes
from sluice.records import Peaks
from sluice.reports.document import Grid, Report, Section, Strong

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["CgroupReport", "DeviceReport", "Mark", "MemoryReport", "Timeline"]

_GIB = 1 << 30

#: Kinds of host memory from the bottom of the picture up, in colours that also differ in brightness.
_KIND_COLOURS = {"anon": "#d95f02", "file": "#7fb3d5", "shmem": "#4d4d4d"}


@public("sluice.measuring")
@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All samples, column by column: times in seconds since the block began, everything else in bytes."""

    #: Time of each sample.
    seconds: array[float]
    #: Readings by name: ``anon``, ``file``, ``shmem``, ``peak`` (recorded by the kernel), and ``cgroup`` in a group.
    columns: Mapping[str, array[int]]

    def __len__(self) -> int:
        return len(self.seconds)

    def rows(self) -> Iterator[dict[str, float]]:
        """Yield a dict for each sample, suitable for ``pandas.DataFrame``."""
        for number, seconds in enumerate(self.seconds):
            yield {"seconds": seconds, **{f"{name}_bytes": column[number] for name, column in self.columns.items()}}


@public("sluice.measuring")
@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A named moment."""

    #: Name given by the caller.
    name: str
    #: Seconds since the block began.
    seconds: float
    #: Growth of host memory since the block began.
    growth: Peaks
    #: Bytes allocated by torch on each accelerator.
    allocated_bytes: Mapping[str, int]


@public("sluice.measuring")
@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupReport:
    """The control group of the process that is closest to its limit."""

    #: 1 or 2.
    version: int
    #: Its path below the mount.
    path: str
    #: Limit, in bytes; None if there is none.
    limit_bytes: int | None
    #: Usage when the block began, in bytes.
    start_bytes: int
    #: Largest usage seen, in bytes, including the page cache of its files.
    peak_bytes: int


@public("sluice.measuring")
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """Memory of one accelerator."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: Largest growth of the bytes allocated by torch.
    allocated_bytes: int
    #: Largest growth of the bytes reserved by torch.
    reserved_bytes: int
    #: Growth of the bytes allocated by torch, at the end.
    final_bytes: int


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport(Report):
    """Memory used by a block of code. Figures are growth since the block began unless stated otherwise."""

    _properties = ("samples",)

    #: Duration of the block, in seconds.
    seconds: float
    #: Requested time between two samples, in seconds.
    interval_seconds: float
    #: Whether a separate process took the samples; a thread, used if none could be started, misses more.
    separate_process: bool
    #: Resident host memory when the block began, by kind.
    start: Peaks
    #: Largest growth of each kind. On Linux the total is exact, because the kernel records it.
    peaks: Peaks
    #: Growth that remains at the end.
    final: Peaks
    #: The control group; None if there is none.
    cgroup: CgroupReport | None
    #: Accelerators that torch used.
    devices: tuple[DeviceReport, ...]
    #: Named moments, in order.
    marks: tuple[Mark, ...]
    #: All samples; not in the JSON.
    timeline: Timeline = field(repr=False)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.timeline)

    def lines(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the rows of the table: label, peak, at the end, at the start."""
        for label, name in (
            ("host, total", "total_bytes"),
            ("  anonymous", "anon_bytes"),
            ("  file-backed", "file_bytes"),
            ("  shared", "shmem_bytes"),
        ):
            peak, final, start = (format_bytes(getattr(each, name)) for each in (self.peaks, self.final, self.start))
            yield label, peak, final, start
        if self.cgroup:
            limit = "no limit" if self.cgroup.limit_bytes is None else f"limit {format_bytes(self.cgroup.limit_bytes)}"
            grown = format_bytes(self.cgroup.peak_bytes - self.cgroup.start_bytes)
            yield f"control group, {limit}", grown, "", format_bytes(self.cgroup.start_bytes)
        for device in self.devices:
            allocated, final = format_bytes(device.allocated_bytes), format_bytes(device.final_bytes)
            yield f"{device.device} allocated", allocated, final, ""
            yield f"{device.device} reserved", format_bytes(device.reserved_bytes), "", ""

    def _grid(self) -> Grid:
        marks = [
            (f"at {mark.seconds:.2f} s: {mark.name}", "", format_bytes(mark.growth.total_bytes), "")
            for mark in self.marks
        ]
        return Grid(("growth of memory", ">peak", ">at the end", ">before"), [*self.lines(), *marks])

    def table(self) -> Table:
        """Return the figures as a rich table."""
        return self._grid().rich()

    def sections(self) -> Iterator[Section]:
        """Yield the length of the block and the table of figures."""
        yield Strong(f"peak growth of memory over {self.seconds:.2f} s")
        yield self._grid()

    def figure(self) -> Figure:
        """Return the timeline drawn by ``draw`` as a matplotlib figure with a legend.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("the picture needs matplotlib: pip install 'sluice[bench]'") from error
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        self.draw(axes)
        axes.legend(loc="upper left")
        return figure

    def draw(self, axes: Axes) -> None:
        """Draw the timeline into axes of a matplotlib figure, so that several reports can share a figure.

        Growth of host memory by kind is stacked, in GiB over seconds; each mark is a dotted line.

        Args:
            axes: Axes to draw into. The caller sets limits and legend.
        """
        columns = self.timeline.columns
        seconds = self.timeline.seconds
        bases = {kind: getattr(self.start, f"{kind}_bytes") for kind in _KIND_COLOURS}
        # Pages that the process had before the block and lost in it would give a negative height.
        grown = [[max(0, value - bases[kind]) / _GIB for value in columns.get(kind, ())] for kind in _KIND_COLOURS]
        if seconds:
            labels = ("host, anonymous", "host, file-backed", "host, shared")
            axes.stackplot(seconds, *grown, labels=labels, colors=tuple(_KIND_COLOURS.values()), alpha=0.8)
        for mark in self.marks:
            axes.axvline(mark.seconds, color="black", linewidth=0.8, linestyle=":")
            axes.annotate(mark.name, (mark.seconds, 1), xycoords=("data", "axes fraction"), rotation=90, va="top")
        axes.set_xlabel("seconds")
        axes.set_ylabel("growth of memory, GiB")

    def _repr_mimebundle_(self, include: Sequence[str], exclude: Sequence[str], **options: Any) -> dict[str, str]:
        """Return the table as notebooks display it."""
        return self.table()._repr_mimebundle_(include, exclude, **options)
