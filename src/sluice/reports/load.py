"""What a load did, measured beside what its plan predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields

from sluice._units import format_bytes
from sluice.records import DeviceMemory, Peaks
from sluice.reports.table import TensorRow, TensorTable

__all__ = ["LoadReport"]

#: Names that the text shows of each list; ``to_json`` and the fields hold all of them.
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load read, where it put it, and what it cost.

    ``str(report)`` is the summary for people, ``report.to_json()`` the complete record for programs, and
    ``report.table()`` says of each tensor how it was filled.

    Example:
        >>> report = LoadReport(
        ...     source="model.pth", format="torch-zip", files=("model.pth",), devices=("cpu",), tensors=1,
        ...     final_bytes=4096, read_bytes=4096, seconds=0.5,
        ...     predicted=Peaks(anon_bytes=4096, file_bytes=0, shmem_bytes=0, total_bytes=4096))
        >>> report.gb_per_second
        8.192e-06
    """

    #: Path of the checkpoint, as it was given.
    source: str
    #: Name of its format: ``"torch-zip"``, ``"torch-legacy"``, ``"safetensors"``.
    format: str
    #: Paths of the files that were read.
    files: tuple[str, ...]
    #: Part of the checkpoint that was loaded, as a dotted path; None is the whole.
    key: str | None = None
    #: Prefix that was stripped from the names of the file, such as ``"module."``; empty when none was.
    prefix: str = ""
    #: Devices of the finished tensors, as torch writes them.
    devices: tuple[str, ...]
    #: Device for each prefix of names, as it was asked for or as ``device="auto"`` chose; the longest prefix wins.
    placement: Mapping[str, str] = field(default_factory=dict)
    #: Number of finished tensors; tied names count once.
    tensors: int
    #: Bytes of the finished tensors.
    final_bytes: int
    #: Bytes that were read from files.
    read_bytes: int
    #: Bytes of finished tensors that are pages of the files: nothing was read for them.
    mapped_bytes: int = 0
    #: Seconds from the call to the return.
    seconds: float
    #: Growth of memory that the plan predicted.
    predicted: Peaks
    #: Growth of memory that was measured; None where the platform cannot tell.
    measured: Peaks | None = None
    #: Predicted and measured growth of each accelerator's memory.
    device_memory: tuple[DeviceMemory, ...] = ()
    #: Bytes that were read by each method: ``"direct"``, ``"buffered"``.
    reads: Mapping[str, int] = field(default_factory=dict)
    #: Reads that could not be done by their first method and were done by a later one.
    stepped_down: int = 0
    #: Names of the model that the checkpoint does not have.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that the model does not have.
    unexpected: tuple[str, ...] = ()
    #: Groups of names that are one tensor.
    tied: tuple[tuple[str, ...], ...] = ()
    #: Number of tensors for each change of dtype: ``{"float32->bfloat16": 12}``.
    cast: Mapping[str, int] = field(default_factory=dict)
    #: What rules made tensors of, by their names in the model: ``"h.0.attn.c_attn.weight transposed, rows 0:768"``.
    origins: Mapping[str, str] = field(default_factory=dict)
    #: Parameters that became new objects because torch refused to swap their contents.
    replaced: tuple[str, ...] = ()
    #: Missing names that the modules' own ``reset_parameters`` filled.
    initialised: tuple[str, ...] = ()
    #: What a reader should know, a sentence each.
    notes: tuple[str, ...] = ()
    #: Makes the rows of ``table()``. Until the report goes it keeps the records of the plan, about 2 KiB a tensor.
    rows: Callable[[], Iterable[TensorRow]] = field(default=tuple, repr=False, compare=False)

    @property
    def gb_per_second(self) -> float:
        """Bytes read for each second, in units of 10**9."""
        return self.read_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def table(self) -> TensorTable:
        """Return how each tensor was filled, a row for each name of the model; made anew by each call."""
        return TensorTable(self.rows())

    def to_json(self) -> dict[str, object]:
        """Return every field but ``rows``, and ``gb_per_second``, as plain values that ``json.dumps`` takes."""
        values = {member.name: _plain(getattr(self, member.name)) for member in fields(self) if member.name != "rows"}
        return {**values, "gb_per_second": self.gb_per_second}

    def __str__(self) -> str:
        lines = [self._what(), self._speed(), self._memory(), *map(_device_line, self.device_memory)]
        lines.extend(f"on {device}: {_shorten(names)}" for device, names in self.prefixes_by_device().items())
        if self.prefix:
            lines.append(f"prefix stripped: {self.prefix!r}")
        if self.cast:
            lines.append("cast: " + ", ".join(f"{change} ({count})" for change, count in self.cast.items()))
        lines.extend(f"{label}: {_shorten(names)}" for label, names in self.name_lists().items() if names)
        lines.extend(f"note: {note}" for note in self.notes)
        return "\n".join(lines)

    def _what(self) -> str:
        part = f", key {self.key!r}" if self.key else ""
        where = ", ".join(self.devices)
        return (
            f"{self.source} ({self.format}{part}): {self.tensors} tensors, {format_bytes(self.final_bytes)} on {where}"
        )

    def _speed(self) -> str:
        methods = "".join(f", {format_bytes(nbytes)} {method}" for method, nbytes in self.reads.items() if nbytes)
        stepped = f", {self.stepped_down} reads stepped down" if self.stepped_down else ""
        read = f"read {format_bytes(self.read_bytes)} in {self.seconds:.2f} s, {self.gb_per_second:.2f} GB/s"
        mapped = f", {format_bytes(self.mapped_bytes)} mapped" if self.mapped_bytes else ""
        return read + methods + stepped + mapped

    def _memory(self) -> str:
        measured = format_bytes(self.measured.total_bytes) if self.measured else "not available here"
        return f"peak growth of host memory: predicted {format_bytes(self.predicted.total_bytes)}, measured {measured}"

    def prefixes_by_device(self) -> dict[str, tuple[str, ...]]:
        """Return the prefixes that each device got; empty where one device has everything."""
        found: dict[str, tuple[str, ...]] = {}
        for prefix, device in self.placement.items() if len(self.placement) > 1 else ():
            found[device] = (*found.get(device, ()), prefix)
        return found

    def name_lists(self) -> dict[str, tuple[str, ...]]:
        """Return the lists of names under the labels that people read; a tied group is one ``a = b``."""
        return {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "tied": tuple(" = ".join(group) for group in self.tied),
            "made by rules": tuple(f"{name} = {origin}" for name, origin in self.origins.items()),
            "replaced": self.replaced,
            "initialised": self.initialised,
        }


def _plain(value: object) -> object:
    if isinstance(value, Peaks):
        return asdict(value)
    if isinstance(value, tuple) and value and isinstance(value[0], DeviceMemory):
        return [asdict(member) for member in value]
    return dict(value) if isinstance(value, Mapping) else value


def _device_line(memory: DeviceMemory) -> str:
    measured = "not available here" if memory.reserved_bytes is None else format_bytes(memory.reserved_bytes)
    return f"growth of {memory.device}: predicted {format_bytes(memory.predicted_bytes)}, reserved {measured}"


def _shorten(names: tuple[str, ...]) -> str:
    # repr: names come from files, and control characters in them must not reach a terminal.
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + more
