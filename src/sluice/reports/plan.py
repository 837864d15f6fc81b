"""The result of a dry run: what a load would read and need, next to the usual ways to load. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice._errors import Alternative
from sluice._messages import listed
from sluice._public import public
from sluice._units import format_bytes
from sluice.planning.budget import MemoryLimit
from sluice.planning.other_methods import MethodVerdict
from sluice.records import Peaks, RemoteReads
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
from sluice.reports.explanation import Explanation
from sluice.reports.ranks import RanksPlan
from sluice.reports.stream import StreamPlan

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["PlanReport"]


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport(Report):
    """Result of a dry run: the reads, placement and memory of a load. Nothing was read and nothing was changed.

    ``str(report)`` is a summary to read, ``report.to_json()`` the complete record for programs, ``report.table()``
    compares the ways to load, and ``report.explain()`` lists how each group of tensors is moved.

    Example:
        >>> report = sluice.plan(model, "model.pth", dtype=torch.bfloat16)
        >>> if not report.fits:
        ...     print(report.shortages, [str(each) for each in report.alternatives])
        >>> groups = report.explain()
    """

    #: Path of the checkpoint, as given.
    source: str
    #: Name of its format: ``"torch-zip"``, ``"safetensors"``, ...
    format: str
    #: Paths of its files.
    files: tuple[str, ...]
    #: Dotted path of the part that would be loaded; None for the whole checkpoint.
    key: str | None = None
    #: Prefix that would be stripped from the names of the file.
    prefix: str = ""
    #: Devices of the finished tensors, as torch writes them.
    devices: tuple[str, ...]
    #: Device for each name prefix, as requested or as ``device="auto"`` chose.
    placement: Mapping[str, str] = field(default_factory=dict)
    #: Whose tensors ``total`` counts: ``"model"``, ``"optimizer state"``, or ``"checkpoint"`` without a model.
    subject: Subject = "model"
    #: Number of tensors that the checkpoint would fill; tied names count once.
    loaded: int
    #: Number of tensors that it could fill: parameters and persistent buffers of the model, tensors of the state of the
    #: optimizer in the checkpoint, or names of the checkpoint.
    total: int
    #: Bytes of the finished tensors that the checkpoint would fill.
    loaded_bytes: int
    #: Number of finished tensors, including those that are initialised; tied names count once.
    tensors: int
    #: F: bytes of the finished tensors.
    final_bytes: int
    #: Bytes of tensor data in the checkpoint, including data that the load does not need.
    checkpoint_bytes: int
    #: Bytes that would be read.
    read_bytes: int
    #: Requests for remote files and their bytes, which stores bill; None if no file is remote.
    remote: RemoteReads | None = None
    #: Bytes of finished tensors that would be mapped pages of the files.
    mapped_bytes: int = 0
    #: Bytes of the staging buffers.
    staging_bytes: int
    #: Predicted growth of host memory, from the call on.
    predicted: Peaks
    #: Predicted growth of the memory reserved by the allocator of each accelerator, in bytes.
    device_bytes: Mapping[str, int]
    #: Limits on the growth of memory, each with its origin.
    limits: tuple[MemoryLimit, ...]
    #: Limits that are exceeded, one sentence per limit; empty if the load fits.
    shortages: tuple[str, ...] = ()
    #: Changed arguments that would fit; empty if the load fits.
    alternatives: tuple[Alternative, ...] = ()
    #: Number of tensors for each change of dtype: ``{"float32->bfloat16": 12}``.
    cast: Mapping[str, int] = field(default_factory=dict)
    #: Names of the model that are not in the checkpoint.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that are not in the model.
    unexpected: tuple[str, ...] = ()
    #: Names of a different shape, whose values the model keeps: the shape in the model, and in the checkpoint.
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    #: Groups of names that are one tensor.
    tied: tuple[tuple[str, ...], ...] = ()
    #: Missing names that the modules' own ``reset_parameters`` would fill.
    initialised: tuple[str, ...] = ()
    #: Needs of sluice and of the usual ways to load, counted from before the model exists.
    methods: tuple[MethodVerdict, ...]
    #: The recommended method; None if nothing fits.
    recommended: str | None
    #: The reason for the recommendation.
    reason: str
    #: Measured speed of a small load of the same files; None without a probe.
    bytes_per_second: float | None = None
    #: The loads of all ranks of a mesh, of which the other fields describe the fullest; None without a mesh.
    ranks: RanksPlan | None = None
    #: The model as a stream; None unless it was requested.
    stream: StreamPlan | None = None
    #: Remarks, one sentence each.
    notes: tuple[str, ...] = ()
    #: Builds the explanation. It keeps the records of the plan alive, about 2 KiB per tensor.
    explanation: Callable[[], Explanation] = field(repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether every limit can be kept: ``load_into`` with the same arguments would not raise ``BudgetError``."""
        return not self.shortages

    @property
    def seconds(self) -> float | None:
        """Estimated seconds of the load, mapped pages touched; None without a probe."""
        speed = self.bytes_per_second
        return None if speed is None else (self.read_bytes + self.mapped_bytes) / speed

    def explain(self) -> Explanation:
        """Return how each group of tensors would be moved: reads, their methods, staging, casts."""
        return self.explanation()

    def to_json(self) -> dict[str, object]:
        """Return every field but ``explanation``, and ``fits``, as plain values that ``json.dumps`` takes."""
        return {
            **plain_fields(self),
            "alternatives": [{"change": each.change, "needs": dict(each.needs)} for each in self.alternatives],
            "methods": [{**plain_fields(each), "possible": each.possible} for each in self.methods],
            "fits": self.fits,
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows of ``table()`` as text."""
        for each in self.methods:
            devices = [format_bytes(each.devices.get(device, 0)) for device in self.device_bytes]
            yield (
                each.method,
                format_bytes(each.host.total_bytes),
                format_bytes(each.host.anon_bytes),
                format_bytes(each.host.file_bytes),
                *devices,
                "yes" if each.fits else "no",
                "; ".join(filter(None, (each.remark, each.needs))),
            )

    @property
    def headers(self) -> tuple[str, ...]:
        """Titles of the columns of ``rows()``."""
        return ("method", "host peak", "anonymous", "file pages", *self.device_bytes, "fits", "remark")

    def _methods(self) -> Grid:
        left = {"method", "fits", "remark"}
        headers = tuple(header if header in left else f">{header}" for header in self.headers)
        recommended = [position for position, each in enumerate(self.methods) if each.method == self.recommended]
        return Grid(headers, list(self.rows()), strong=recommended[0] if recommended else None)

    def table(self) -> Table:
        """Return the comparison of the ways to load as a rich table."""
        return self._methods().rich()

    def lines(self) -> Iterator[str]:
        """Yield the summary without the comparison, line by line."""
        title = checkpoint_title(self.source, self.format, self.key)
        where = f" finished on {', '.join(self.devices)}" if self.loaded else ""
        yield (
            f"would load {loaded_title(self.loaded, self.total, self.subject, title)}, "
            f"{format_bytes(self.loaded_bytes)}{where}, {format_bytes(self.read_bytes)} to read"
            + (f", {format_bytes(self.mapped_bytes)} to map" if self.mapped_bytes else "")
        )
        if self.remote is not None:
            yield self.remote.describe()
        yield from cast_lines(self.cast)
        yield f"predicted growth: {format_bytes(self.predicted.total_bytes)} of host memory" + "".join(
            f", {format_bytes(nbytes)} of {device} memory" for device, nbytes in self.device_bytes.items()
        )
        if self.seconds is not None:
            yield f"estimated time: {self.seconds:.2f} s, by a small load of the same files"
        for limit in self.limits:
            yield f"limit of {limit.where}: {format_bytes(limit.nbytes)} ({limit.origin})"
        yield from self.shortages
        for each in self.alternatives:
            yield f"would fit: {each}"

    def verdict(self) -> str:
        """Return the recommendation, in one sentence."""
        return f"recommended: {self.recommended or 'none'}, because {self.reason}"

    def sections(self) -> Iterator[Section]:
        """Yield the summary, names that do not match, the comparison of the ways to load, and the recommendation."""
        title, *others = self.lines()
        yield Strong(title)
        yield from others
        mismatched = describe_mismatched(self.mismatched)
        for label, names in (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of a different shape, not loaded", mismatched),
        ):
            if names:
                yield listed(label, names)
        if self.ranks is not None:
            yield from self.ranks.sections()
        if self.stream is not None:
            yield from self.stream.sections()
        yield self._methods()
        yield Strong(self.verdict())
        yield from (f"note: {note}" for note in self.notes)
