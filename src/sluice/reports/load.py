"""The results of a load and of a refresh, and the base class of those of a load and of its dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from sluice._messages import first_names, listed
from sluice._public import public
from sluice._units import counted, format_bytes, format_rate, gb_per_second
from sluice.records import DeviceMemory, Peaks, RemoteReads
from sluice.reports.document import Grid, Report, Section, Strong, cast_lines, checkpoint_title
from sluice.reports.table import TensorRow, TensorTable

__all__ = ["LoadFigures", "LoadReport", "MergedAdapter", "RankReport", "RefreshState", "Subject"]

#: The object whose tensors a load counts.
Subject: TypeAlias = Literal["model", "optimizer state", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedAdapter:
    """An adapter that a load merges into the weights it reads."""

    #: Path or address of its tensors.
    source: str
    #: Kind of adapter: ``"LoRA"``, ``"DoRA"``, ``"LoHa"``, ``"LoKr"``, ``"bias"``, ``"replaced"`` for whole tensors.
    kinds: tuple[str, ...]
    #: Factor that the caller gave.
    weight: float
    #: Factors of its sums, with ``weight``, each once.
    scales: tuple[float, ...]
    #: Number of changes of tensors of the model.
    tensors: int

    def describe(self) -> str:
        """Return the adapter as one line."""
        scales = f", scale {first_names([f'{scale:g}' for scale in self.scales])}" if self.scales else ""
        return f"merged {self.source}: {', '.join(self.kinds)}, {counted(self.tensors, 'change')}{scales}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures(Report):
    """A load, planned or done; names and devices are those of the model, or of the checkpoint without a model."""

    #: Path of the checkpoint, as given.
    source: str
    #: Name of its format: ``"torch-zip"``, ``"torch-legacy"``, ``"safetensors"``, ...
    format: str
    #: Paths of its files that are read.
    files: tuple[str, ...]
    #: Dotted path of the part that is loaded; None for the whole checkpoint.
    key: str | None = None
    #: Prefix that is stripped from the names of the file, such as ``"module."``; empty if there is no prefix.
    prefix: str = ""
    #: Devices of the finished tensors, as torch writes them.
    devices: tuple[str, ...]
    #: Device for each name prefix, as requested or as ``device="auto"`` chose; the longest prefix wins.
    placement: Mapping[str, str] = field(default_factory=dict)
    #: The object whose tensors ``total`` counts; ``"checkpoint"`` without a model.
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
    #: F: bytes of the finished tensors.
    final_bytes: int
    #: Bytes read from files.
    read_bytes: int
    #: Requests for remote files and their bytes, which stores bill, planned and made; None if no file is remote.
    remote: RemoteReads | None = None
    #: Bytes of finished tensors that are mapped pages of the files; nothing is read for them.
    mapped_bytes: int = 0
    #: Predicted growth of host memory, from the call on.
    predicted: Peaks
    #: Number of tensors for each change of dtype: ``{"float32->bfloat16": 12}``.
    cast: Mapping[str, int] = field(default_factory=dict)
    #: Names of the model that are not in the checkpoint.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that are not in the model.
    unexpected: tuple[str, ...] = ()
    #: Names of a different shape, whose values the model keeps: the shape in the model, and in the checkpoint.
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    #: Adapters that are merged, in order.
    adapters: tuple[MergedAdapter, ...] = ()
    #: Groups of names that are one tensor.
    tied: tuple[tuple[str, ...], ...] = ()
    #: Missing names that the modules' own ``reset_parameters`` fills.
    initialised: tuple[str, ...] = ()
    #: Remarks, one sentence each.
    notes: tuple[str, ...] = ()

    def title(self, verb: str) -> str:
        """Return how many of how many tensors come from the checkpoint: the first line."""
        count = f"{verb} {self.loaded:,} of {counted(self.total, 'tensor')}"
        subject = "" if self.subject == "checkpoint" else f"the {self.subject} from "
        source = checkpoint_title(self.source, self.format, self.key)
        return f"{count} of {subject}{source}, {format_bytes(self.loaded_bytes)}"

    def unmatched(self) -> Iterator[str]:
        """Yield a line for each kind of names that do not match."""
        shapes = (
            f"{name} {list(own)}, {list(saved)} in the checkpoint" for name, (own, saved) in self.mismatched.items()
        )
        labelled = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of a different shape, not loaded": tuple(shapes),
        }
        return (listed(label, names) for label, names in labelled.items() if names)


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshState:
    """Contents of a model. It is small, and can be pickled: a digest for each tensor; the report is left out then.

    Example:
        >>> state = sluice.refresh(model, "model.pth")
        >>> sluice.refresh(model, "model.pth", since=state).version == state.version
        True
    """

    #: Version of the weights: that in the metadata (``model_version``; of safetensors also ``version``), else a digest.
    version: str
    #: Digest of the content of each tensor, by its name in the model; also of further copies of tied tensors.
    contents: Mapping[str, str] = field(repr=False)
    #: Names of the tensors that this refresh has filled.
    changed: tuple[str, ...] = ()
    #: Number of tensors that it has left alone.
    unchanged: int = 0
    #: Bytes, times and memory of the refresh; None for the state of a report, and after pickling.
    report: LoadReport | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        plain = replace(self, report=None, contents=dict(self.contents))
        state = {name: getattr(plain, name) for name in ("version", "contents", "changed", "unchanged")}
        return partial(RefreshState, **state), ()


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
