"""What a load would do and take, and what other ways to load would: the result of ``sluice.plan``. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING

from sluice._errors import Alternative
from sluice._units import format_bytes
from sluice.planning.budget import MemoryLimit
from sluice.planning.other_methods import Rates
from sluice.planning.recommendation import MethodVerdict
from sluice.records import Peaks
from sluice.reports.explanation import Explanation
from sluice.reports.table import aligned

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["PlanReport"]

_HEADERS = ("method", "host peak", "anonymous", "file pages", "seconds", "fits", "remark")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What a load would read, place and take. Nothing was read and nothing was touched.

    ``str(report)`` is the summary for people, ``report.to_json()`` the complete record for programs, ``report.table()``
    compares the ways to load, and ``report.explain()`` says how each group of tensors is moved.

    Example:
        >>> report = sluice.plan(model, "model.pth", dtype=torch.bfloat16)
        >>> if not report.fits:
        ...     print(report.shortages, [str(each) for each in report.alternatives])
        >>> groups = report.explain()
    """

    #: Path of the checkpoint, as it was given.
    source: str
    #: Name of its format: ``"torch-zip"``, ``"safetensors"``, ...
    format: str
    #: Paths of its files.
    files: tuple[str, ...]
    #: Part of the checkpoint that would be loaded, as a dotted path; None is the whole.
    key: str | None = None
    #: Prefix that would be stripped from the names of the file.
    prefix: str = ""
    #: Devices of the finished tensors, as torch writes them.
    devices: tuple[str, ...]
    #: Device for each prefix of names, as it was asked for or as ``device="auto"`` chose.
    placement: Mapping[str, str] = field(default_factory=dict)
    #: Number of finished tensors; tied names count once.
    tensors: int
    #: F: bytes of the finished tensors.
    final_bytes: int
    #: Bytes of tensor data in the checkpoint, whether the load wants it or not.
    checkpoint_bytes: int
    #: Bytes that would be read.
    read_bytes: int
    #: Bytes of finished tensors that would be pages of the files.
    mapped_bytes: int = 0
    #: Bytes of the staging buffers.
    staging_bytes: int
    #: Predicted growth of host memory, from the call on.
    predicted: Peaks
    #: Predicted growth of what the allocator of each accelerator reserves, in bytes.
    device_bytes: Mapping[str, int]
    #: What memory may grow by, and where that number comes from.
    limits: tuple[MemoryLimit, ...]
    #: What is short, a sentence each; empty when the load fits.
    shortages: tuple[str, ...] = ()
    #: What would fit instead, where the load does not.
    alternatives: tuple[Alternative, ...] = ()
    #: Number of tensors for each change of dtype: ``{"float32->bfloat16": 12}``.
    cast: Mapping[str, int] = field(default_factory=dict)
    #: Names of the model that the checkpoint does not have.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that the model does not have.
    unexpected: tuple[str, ...] = ()
    #: Groups of names that are one tensor.
    tied: tuple[tuple[str, ...], ...] = ()
    #: Missing names that the modules' own ``reset_parameters`` would fill.
    initialised: tuple[str, ...] = ()
    #: What sluice and the usual ways to load would take, from before the model exists.
    methods: tuple[MethodVerdict, ...]
    #: The method to take; None when nothing fits.
    recommended: str | None
    #: Why.
    reason: str
    #: How fast the machine was; None without a probe.
    rates: Rates | None = None
    #: What a reader should know, a sentence each.
    notes: tuple[str, ...] = ()
    #: Makes the explanation. Until the report goes it keeps the records of the plan, about 2 KiB a tensor.
    explanation: Callable[[], Explanation] = field(repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether every limit can be kept: ``load_into`` with the same arguments would not raise ``BudgetError``."""
        return not self.shortages

    @property
    def seconds(self) -> float | None:
        """Estimated seconds of the load; None without a probe."""
        return next(each.seconds for each in self.methods if each.method.startswith("sluice"))

    def explain(self) -> Explanation:
        """Return how each group of tensors would be moved: reads, their methods, staging, casts."""
        return self.explanation()

    def to_json(self) -> dict[str, object]:
        """Return every field but ``explanation``, and ``fits``, as plain values that ``json.dumps`` takes."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "explanation"}
        return {
            **values,
            "predicted": asdict(self.predicted),
            "limits": [asdict(limit) for limit in self.limits],
            "alternatives": [{"change": each.change, "needs": dict(each.needs)} for each in self.alternatives],
            "methods": [{**asdict(each), "possible": each.possible} for each in self.methods],
            "rates": self.rates and asdict(self.rates),
            "fits": self.fits,
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield what ``table()`` shows, as text."""
        for each in self.methods:
            devices = [format_bytes(each.devices.get(device, 0)) for device in self.device_bytes]
            yield (
                each.method,
                format_bytes(each.host.total_bytes),
                format_bytes(each.host.anon_bytes),
                format_bytes(each.host.file_bytes),
                *devices,
                "-" if each.seconds is None else f"{each.seconds:.2f}",
                "yes" if each.fits else "no",
                "; ".join(filter(None, (each.remark, each.needs))),
            )

    @property
    def headers(self) -> tuple[str, ...]:
        """What stands above the columns of ``rows()``."""
        return (*_HEADERS[:4], *self.device_bytes, *_HEADERS[4:])

    def table(self) -> Table:
        """Return the comparison of the ways to load as a rich table."""
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for header in self.headers:
            table.add_column(header, justify="left" if header in {"method", "fits", "remark"} else "right")
        for row in self.rows():
            table.add_row(*map(Text, row), style="bold" if row[0] == self.recommended else None)
        return table

    def __rich__(self) -> Table:
        return self.table()

    def lines(self) -> Iterator[str]:
        """Yield the summary without the comparison, a line each."""
        part = f", key {self.key!r}" if self.key else ""
        yield (
            f"{self.source} ({self.format}{part}): {self.tensors} tensors, {format_bytes(self.final_bytes)} finished "
            f"on {', '.join(self.devices)}, {format_bytes(self.read_bytes)} to read"
            + (f", {format_bytes(self.mapped_bytes)} to map" if self.mapped_bytes else "")
        )
        if self.cast:
            yield "cast: " + ", ".join(f"{change} ({count})" for change, count in self.cast.items())
        yield f"predicted growth: {format_bytes(self.predicted.total_bytes)} of host memory" + "".join(
            f", {format_bytes(nbytes)} of {device} memory" for device, nbytes in self.device_bytes.items()
        )
        for limit in self.limits:
            yield f"limit of {limit.where}: {format_bytes(limit.nbytes)} ({limit.origin})"
        yield from self.shortages
        for each in self.alternatives:
            yield f"would fit: {each}"

    def verdict(self) -> str:
        """Return what to do, in one sentence."""
        return f"recommended: {self.recommended or 'none'}, because {self.reason}"

    def __str__(self) -> str:
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*self.lines(), *aligned(self.headers, list(self.rows())), self.verdict(), *notes])
