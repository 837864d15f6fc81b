"""What ``sluice.measure`` found: figures, a timeline, a table, a picture."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sluice._units import format_bytes
from sluice.records import Peaks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["CgroupReport", "DeviceReport", "Mark", "MemoryReport", "Timeline"]

_GIB = 1 << 30

#: Kinds of host memory from the bottom of the picture up, in colours that differ in brightness too.
_KIND_COLOURS = {"anon": "#d95f02", "file": "#7fb3d5", "shmem": "#4d4d4d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All samples, column by column; times are seconds since the block began, all else is bytes."""

    #: Moments.
    seconds: array[float]
    #: Readings by name: ``anon``, ``file``, ``shmem``, ``peak`` (the kernel's own record), and, where they were taken,
    #: ``pss``, ``cgroup``, ``device0`` and so on.
    columns: Mapping[str, array[int]]

    def __len__(self) -> int:
        return len(self.seconds)

    def rows(self) -> Iterator[dict[str, float]]:
        """Yield a dict for each sample, as ``pandas.DataFrame`` takes them."""
        for number, seconds in enumerate(self.seconds):
            yield {"seconds": seconds, **{f"{name}_bytes": column[number] for name, column in self.columns.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A named moment."""

    #: What the caller called it.
    name: str
    #: Since the block began.
    seconds: float
    #: Growth of host memory since the block began, at that moment.
    growth: Peaks
    #: Bytes that torch's allocator held on each accelerator at that moment.
    allocated_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupReport:
    """The control group of the process that has the least room."""

    #: 1 or 2.
    version: int
    #: Its path below the mount.
    path: str
    #: What it may use, in bytes; None without a limit.
    limit_bytes: int | None
    #: Usage when the block began, in bytes.
    start_bytes: int
    #: Largest usage seen, in bytes. It counts the page cache of its files too.
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """Memory of one accelerator."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: Largest growth of what torch's allocator has given out, in bytes.
    allocated_bytes: int
    #: Largest growth of what torch's allocator holds, in bytes.
    reserved_bytes: int
    #: What the allocator has given out at the end, as growth in bytes.
    final_bytes: int
    #: Largest growth of the whole device's use, by all processes, through NVML; None where that is not installed.
    whole_device_bytes: int | None
    #: What the whole device used more at the end than when the block began, in bytes; None where NVML is not installed.
    whole_device_final_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a block of code did to memory. All figures are growth since the block began unless they say otherwise."""

    #: Length of the block.
    seconds: float
    #: Between two samples, as asked for.
    interval_seconds: float
    #: Whether a process of its own took the samples; a thread, where none could be started, sees less.
    separate_process: bool
    #: Resident host memory when the block began, by kind.
    start: Peaks
    #: Largest growth of each kind. The total is exact on Linux: the kernel records it, no sample can miss it.
    peaks: Peaks
    #: Growth that remained at the end.
    final: Peaks
    #: Largest growth of the proportional set size (shared pages divided among their processes); None unless asked for.
    pss_bytes: int | None
    #: The control group; None where there is none.
    cgroup: CgroupReport | None
    #: Accelerators that torch used.
    devices: tuple[DeviceReport, ...]
    #: Named moments, in order.
    marks: tuple[Mark, ...]
    #: All samples.
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        """Return everything but the timeline as plain values that ``json.dumps`` takes."""
        return {
            "seconds": self.seconds,
            "interval_seconds": self.interval_seconds,
            "separate_process": self.separate_process,
            "samples": len(self.timeline),
            **{name: asdict(getattr(self, name)) for name in ("start", "peaks", "final")},
            "pss_bytes": self.pss_bytes,
            "cgroup": self.cgroup and asdict(self.cgroup),
            "devices": [asdict(device) for device in self.devices],
            "marks": [asdict(mark) for mark in self.marks],
        }

    def lines(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield what the table shows: label, peak, at the end, at the start."""
        for label, field in (
            ("host, total", "total_bytes"),
            ("  anonymous", "anon_bytes"),
            ("  file-backed", "file_bytes"),
            ("  shared", "shmem_bytes"),
        ):
            peak, final, start = (format_bytes(getattr(each, field)) for each in (self.peaks, self.final, self.start))
            yield label, peak, final, start
        if self.pss_bytes is not None:
            yield "host, Pss", format_bytes(self.pss_bytes), "", ""
        if self.cgroup:
            limit = "no limit" if self.cgroup.limit_bytes is None else f"limit {format_bytes(self.cgroup.limit_bytes)}"
            grown = format_bytes(self.cgroup.peak_bytes - self.cgroup.start_bytes)
            yield f"control group, {limit}", grown, "", format_bytes(self.cgroup.start_bytes)
        for device in self.devices:
            yield (
                f"{device.device} allocated",
                format_bytes(device.allocated_bytes),
                format_bytes(device.final_bytes),
                "",
            )
            yield f"{device.device} reserved", format_bytes(device.reserved_bytes), "", ""
            if device.whole_device_bytes is not None:
                final = "" if device.whole_device_final_bytes is None else format_bytes(device.whole_device_final_bytes)
                yield f"{device.device} all processes", format_bytes(device.whole_device_bytes), final, ""

    def table(self) -> Table:
        """Return the figures as a rich table."""
        from rich.table import Table

        table = Table(title=f"memory over {self.seconds:.2f} s, growth", title_justify="left")
        table.add_column("")
        for title in ("peak", "at the end", "before"):
            table.add_column(title, justify="right")
        for row in self.lines():
            table.add_row(*row)
        for mark in self.marks:
            table.add_row(f"at {mark.seconds:.2f} s: {mark.name}", "", format_bytes(mark.growth.total_bytes), "")
        return table

    def figure(self) -> Figure:
        """Return the timeline as a matplotlib figure; what ``draw`` shows, with a legend.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("the picture needs matplotlib: pip install sluice[bench]") from error
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        self.draw(axes)
        axes.legend(loc="upper left")
        return figure

    def draw(self, axes: Axes) -> None:
        """Draw the timeline into axes of a matplotlib figure, so that several reports can share one picture.

        Growth of host memory by kind is stacked, in GiB over seconds; each device that NVML saw is a line, and each
        mark a dotted one.

        Args:
            axes: Where to draw. Limits and legend are the caller's.
        """
        columns = self.timeline.columns
        seconds = self.timeline.seconds
        bases = {kind: getattr(self.start, f"{kind}_bytes") for kind in _KIND_COLOURS}
        # Pages that the process had before the block and lost in it would make a stack of negative height.
        grown = [[max(0, value - bases[kind]) / _GIB for value in columns.get(kind, ())] for kind in _KIND_COLOURS]
        if seconds:
            labels = ("host, anonymous", "host, file-backed", "host, shared")
            axes.stackplot(seconds, *grown, labels=labels, colors=tuple(_KIND_COLOURS.values()), alpha=0.8)
        for name, column in columns.items():
            if name.startswith("device"):
                line = [(value - column[0]) / _GIB for value in column]
                axes.plot(seconds, line, label=f"GPU {name.removeprefix('device')}, all processes", linewidth=1.5)
        for mark in self.marks:
            axes.axvline(mark.seconds, color="black", linewidth=0.8, linestyle=":")
            axes.annotate(mark.name, (mark.seconds, 1), xycoords=("data", "axes fraction"), rotation=90, va="top")
        axes.set_xlabel("seconds")
        axes.set_ylabel("growth of memory, GiB")

    def _repr_mimebundle_(self, include: Sequence[str], exclude: Sequence[str], **options: Any) -> dict[str, str]:
        """Show the table where a notebook shows the report."""
        return self.table()._repr_mimebundle_(include, exclude, **options)

    def __str__(self) -> str:
        rows = "; ".join(f"{label.strip()} {peak}" for label, peak, _, _ in self.lines())
        return f"peak growth of memory over {self.seconds:.2f} s: {rows}"
