"""The result of a load: what was read and placed, and predicted next to measured memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from sluice._messages import listed
from sluice._public import public
from sluice._units import counted, format_bytes, format_rate, gb_per_second
from sluice.records import DeviceMemory, Peaks, RemoteReads
from sluice.reports.document import (
    Grid,
    Report,
    Section,
    Strong,
    Subject,
    cast_lines,
    checkpoint_title,
    describe_mismatched,
    loaded_title,
    plain_fields,
)
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
    #: Bytes that other ranks read for it and sent.
    received_bytes: int = 0
    #: Bytes of its finished tensors.
    final_bytes: int
    #: Predicted growth of its host memory, in bytes.
    predicted_bytes: int
    #: Seconds until its tensors were in place.
    seconds: float


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Report):
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

    #: Path of the checkpoint, as given.
    source: str
    #: Name of its format: ``"torch-zip"``, ``"torch-legacy"``, ``"safetensors"``.
    format: str
    #: Paths of the files that were read.
    files: tuple[str, ...]
    #: Dotted path of the part that was loaded; None for the whole checkpoint.
    key: str | None = None
    #: Prefix stripped from the names of the file, such as ``"module."``; empty if none was.
    prefix: str = ""
    #: Devices of the finished tensors, as torch writes them.
    devices: tuple[str, ...]
    #: Device for each name prefix, as requested or as ``device="auto"`` chose; the longest prefix wins.
    placement: Mapping[str, str] = field(default_factory=dict)
    #: Whose tensors ``total`` counts: ``"model"``, ``"optimizer state"``, or ``"checkpoint"`` without a model.
    subject: Subject = "model"
    #: Number of tensors that the checkpoint fills; tied names count once.
    loaded: int
    #: Number of tensors that it could fill: parameters and persistent buffers of the model, tensors of the state of the
    #: optimizer in the checkpoint, or names of the checkpoint.
    total: int
    #: Bytes of the finished tensors that the checkpoint fills.
    loaded_bytes: int
    #: Number of finished tensors, including those that are initialised; tied names count once.
    tensors: int
    #: Bytes of the finished tensors.
    final_bytes: int
    #: Bytes read from files.
    read_bytes: int
    #: Bytes of finished tensors that are mapped pages of the files; nothing was read for them.
    mapped_bytes: int = 0
    #: Seconds from the call to the return.
    seconds: float
    #: Predicted growth of host memory.
    predicted: Peaks
    #: Measured growth of host memory; None if the platform does not report it.
    measured: Peaks | None = None
    #: Predicted and measured growth of each accelerator's memory.
    device_memory: tuple[DeviceMemory, ...] = ()
    #: Bytes read by each method: ``"direct"``, ``"buffered"``.
    reads: Mapping[str, int] = field(default_factory=dict)
    #: Requests for remote files and their bytes, planned and made; None if no file is remote.
    remote: RemoteReads | None = None
    #: Number of reads whose preferred method failed and that used a later one.
    stepped_down: int = 0
    #: Names of the model that are not in the checkpoint.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that are not in the model.
    unexpected: tuple[str, ...] = ()
    #: Names of a different shape, whose values the model keeps: the shape in the model, and in the checkpoint.
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    #: Groups of names that are one tensor.
    tied: tuple[tuple[str, ...], ...] = ()
    #: Number of tensors for each change of dtype: ``{"float32->bfloat16": 12}``.
    cast: Mapping[str, int] = field(default_factory=dict)
    #: How rules produced tensors, by name in the model: ``"h.0.attn.c_attn.weight transposed, rows 0:768"``.
    origins: Mapping[str, str] = field(default_factory=dict)
    #: Parameters that became new objects because torch refused to swap their contents.
    replaced: tuple[str, ...] = ()
    #: Missing names that the modules' own ``reset_parameters`` filled.
    initialised: tuple[str, ...] = ()
    #: Figures of every rank of a model of DTensors, in the order of ranks; empty for a load of one process.
    ranks: tuple[RankReport, ...] = ()
    #: Remarks, one sentence each.
    notes: tuple[str, ...] = ()
    #: Builds the rows of ``table()``. It keeps the records of the plan alive, about 2 KiB per tensor.
    rows: Callable[[], Iterable[TensorRow]] = field(default=tuple, repr=False, compare=False)

    @property
    def gb_per_second(self) -> float:
        """Bytes read per second, in units of 10**9."""
        return gb_per_second(self.read_bytes, self.seconds)

    def table(self) -> TensorTable:
        """Return how each tensor was filled, one row per name of the model; each call builds the rows again."""
        return TensorTable(self.rows())

    def to_json(self) -> dict[str, object]:
        """Return every field but ``rows``, and ``gb_per_second``, as plain values that ``json.dumps`` takes."""
        return {**plain_fields(self), "gb_per_second": self.gb_per_second}

    def sections(self) -> Iterator[Section]:
        """Yield what was loaded, read and cast, the growth of memory, and the names that need attention."""
        title = checkpoint_title(self.source, self.format, self.key)
        where = f" on {', '.join(self.devices)}" if self.loaded else ""
        yield Strong(
            f"loaded {loaded_title(self.loaded, self.total, self.subject, title)}, "
            f"{format_bytes(self.loaded_bytes)}{where}"
        )
        yield self._reads()
        if self.remote is not None:
            yield self.remote.describe()
        yield self._memory()
        if self.ranks:
            yield self._ranks()
        for device, prefixes in self.prefixes_by_device().items():
            yield listed(f"on {device}", prefixes)
        if self.prefix:
            yield f"prefix stripped: {self.prefix}"
        yield from cast_lines(self.cast)
        yield from (listed(label, names) for label, names in self.name_lists().items() if names)
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
                *map(format_bytes, (each.read_bytes, each.received_bytes, each.final_bytes, each.predicted_bytes)),
                f"{each.seconds:.2f}",
            )
            for each in self.ranks
        ]
        return Grid(("ranks", ">read", ">received", ">finished", ">growth, at most", ">seconds"), rows)

    def prefixes_by_device(self) -> dict[str, tuple[str, ...]]:
        """Return the prefixes that were placed on each device; empty if one device has everything."""
        found: dict[str, tuple[str, ...]] = {}
        for prefix, device in self.placement.items() if len(self.placement) > 1 else ():
            found[device] = (*found.get(device, ()), prefix)
        return found

    def name_lists(self) -> dict[str, tuple[str, ...]]:
        """Return the lists of names by the label that is printed; a tied group is one ``a = b``."""
        return {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of a different shape, not loaded": describe_mismatched(self.mismatched),
            "tied": tuple(" = ".join(group) for group in self.tied),
            "produced by rules": tuple(f"{name} = {origin}" for name, origin in self.origins.items()),
            "replaced": self.replaced,
            "initialised": self.initialised,
        }


def _size(nbytes: int | None) -> str:
    return "not available" if nbytes is None else format_bytes(nbytes)
