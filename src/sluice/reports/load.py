"""The result of a load: what was read and placed, and predicted next to measured memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from sluice._messages import listed
from sluice._public import public
from sluice._units import counted, format_bytes, format_rate, gb_per_second
from sluice.records import DeviceMemory, Peaks
from sluice.reports.document import Grid, Section, Strong, cast_lines
from sluice.reports.load_figures import LoadFigures
from sluice.reports.refresh import RefreshState
from sluice.reports.table import TensorRow, TensorTable

__all__ = ["LoadReport", "RankReport"]

#: Labels of the kinds of host memory, by field of ``Peaks``.
_HOST_MEMORY = {
    "anon_bytes": "host, anonymous",
    "file_bytes": "host, mapped files",
    "shmem_bytes": "host, shared",
    "total_bytes": "host, total",
}


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Figures of one rank of a load that several ranks made together."""

    #: Rank in the default process group.
    rank: int
    #: Name of its host.
    host: str
    #: Bytes that it read from files.
    read_bytes: int
    #: Bytes of its finished tensors.
    final_bytes: int
    #: Predicted growth of its host memory, in bytes.
    predicted_bytes: int
    #: Seconds until its tensors were in place.
    seconds: float


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(LoadFigures):
    """Result of a load: the bytes it read, the devices of the tensors, its memory and its time.

    ``str(report)`` is a summary to read, ``report.to_json()`` the complete record for programs, and ``report.table()``
    lists how each tensor was filled.

    Example:
        >>> report = LoadReport(
        ...     source="model.pth", format="torch-zip", files=("model.pth",), devices=("cpu",), loaded=1,
        ...     total=1, loaded_bytes=4096, tensors=1, final_bytes=4096, read_bytes=4096, seconds=0.5,
        ...     predicted=Peaks(anon_bytes=4096, file_bytes=0, shmem_bytes=0, total_bytes=4096))
        >>> report.gb_per_second
        8.192e-06
    """

    _properties = ("gb_per_second",)

    #: Seconds from the call to the return.
    seconds: float
    #: Measured growth of host memory; None if the platform does not report it.
    measured: Peaks | None = None
    #: Predicted and measured growth of each accelerator's memory.
    device_memory: tuple[DeviceMemory, ...] = ()
    #: Bytes read by each method: ``"direct"``, ``"buffered"``.
    reads: Mapping[str, int] = field(default_factory=dict)
    #: Number of reads whose preferred method failed and that used a later one.
    stepped_down: int = 0
    #: How rules produced tensors, by name in the model: ``"h.0.attn.c_attn.weight transposed, rows 0:768"``.
    origins: Mapping[str, str] = field(default_factory=dict)
    #: Parameters that became new objects because torch refused to swap their contents.
    replaced: tuple[str, ...] = ()
    #: Figures of every rank of a model of DTensors, in the order of ranks; empty for a load of one process.
    ranks: tuple[RankReport, ...] = ()
    #: Builds ``state``; it keeps the index of the checkpoint alive.
    state_maker: Callable[[], RefreshState] | None = field(default=None, repr=False, compare=False)
    #: Builds the rows of ``table()``. It keeps the records of the plan alive, about 2 KiB per tensor.
    rows: Callable[[], Iterable[TensorRow]] = field(default=tuple, repr=False, compare=False)

    @property
    def gb_per_second(self) -> float:
        """Bytes read per second, in units of 10**9."""
        return gb_per_second(self.read_bytes, self.seconds)

    @property
    def state(self) -> RefreshState | None:
        """State of the model, for ``sluice.refresh(since=)``; None for a load into something else."""
        return None if self.state_maker is None else self.state_maker()

    def table(self) -> TensorTable:
        """Return how each tensor was filled, one row per name of the model; each call builds the rows again."""
        return TensorTable(self.rows())

    def sections(self) -> Iterator[Section]:
        """Yield what was loaded, read and cast, the growth of memory, and the names that need attention."""
        yield Strong(self.title("loaded") + (f" on {', '.join(self.devices)}" if self.loaded else ""))
        yield self._reads()
        if self.remote is not None:
            yield self.remote.describe()
        yield self._memory()
        if self.ranks:
            yield self._ranks()
        if len(self.placement) > 1:
            for device in dict.fromkeys(self.placement.values()):
                yield listed(f"on {device}", [prefix for prefix, other in self.placement.items() if other == device])
        if self.prefix:
            yield f"prefix stripped: {self.prefix}"
        yield from cast_lines(self.cast)
        yield from (each.describe() for each in self.adapters)
        yield from self.unmatched()
        labelled = {
            "tied": tuple(" = ".join(group) for group in self.tied),
            "produced by rules": tuple(f"{name} = {origin}" for name, origin in self.origins.items()),
            "replaced": self.replaced,
            "initialised": self.initialised,
        }
        yield from (listed(label, names) for label, names in labelled.items() if names)
        yield from (f"note: {note}" for note in self.notes)

    def _reads(self) -> str:
        methods = ", ".join(f"{format_bytes(nbytes)} {method}" for method, nbytes in self.reads.items() if nbytes)
        return "".join(
            [
                f"read {format_bytes(self.read_bytes)} in {format_rate(self.read_bytes, self.seconds)}",
                f": {methods}" if methods else "",
                f"; {counted(self.stepped_down, 'read')} stepped down" if self.stepped_down else "",
                f"; {format_bytes(self.mapped_bytes)} mapped" if self.mapped_bytes else "",
            ]
        )

    def _memory(self) -> Grid:
        rows = []
        for name, label in _HOST_MEMORY.items():
            measured = getattr(self.measured, name) if self.measured else None
            rows.append((label, format_bytes(getattr(self.predicted, name)), _size(measured)))
        rows += [
            (f"{device.device}, reserved", format_bytes(device.predicted_bytes), _size(device.reserved_bytes))
            for device in self.device_memory
        ]
        return Grid(("growth of memory", ">predicted, at most", ">measured"), rows)

    def _ranks(self) -> Grid:
        rows = [
            (
                f"rank {each.rank} on {each.host}",
                *map(format_bytes, (each.read_bytes, each.final_bytes, each.predicted_bytes)),
                f"{each.seconds:.2f}",
            )
            for each in self.ranks
        ]
        return Grid(("ranks", ">read", ">finished", ">growth, at most", ">seconds"), rows)


def _size(nbytes: int | None) -> str:
    return "not available" if nbytes is None else format_bytes(nbytes)
