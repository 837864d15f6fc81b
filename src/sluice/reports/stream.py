"""Reports on streams, planned and running."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sluice._public import public
from sluice._units import counted, format_bytes
from sluice.reports.document import Grid, Report, Section, Strong, checkpoint_title

__all__ = ["StreamPlan", "StreamReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures(Report):
    """The memory and the reads of a stream, planned or running."""

    #: Number of blocks whose weights are read when they are called.
    blocks: int
    #: Bytes of the weights that stay in memory.
    resident_bytes: int
    #: Bytes of memory through which the others pass.
    window_bytes: int
    #: Bytes that a call of the model reads from the files if it uses every block once.
    call_bytes: int
    #: Bytes of the files that rest in host memory after the first call: of packed weights, or for an accelerator.
    host_bytes: int = 0


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan(StreamFigures):
    """The memory and the reads of a stream that ``sluice.plan(stream=True)`` plans."""

    #: Bytes for weights, as given or as the limits leave.
    memory_bytes: int
    #: Least bytes with which the model can be streamed.
    smallest_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the memory is enough."""
        return self.smallest_bytes <= self.memory_bytes

    def sections(self) -> Iterator[Section]:
        """Yield what would stay, what would pass through, and what each call would read."""
        if not self.fits:
            yield (
                f"as a stream: at least {format_bytes(self.smallest_bytes)} are needed for weights, "
                f"{format_bytes(self.memory_bytes)} are allowed"
            )
            return
        yield (
            f"as a stream: {format_bytes(self.resident_bytes)} stay in memory, the weights of "
            f"{counted(self.blocks, 'block')} pass through {format_bytes(self.window_bytes)}; each call reads "
            f"{format_bytes(self.call_bytes)}"
            + (f", and {format_bytes(self.host_bytes)} from host memory" if self.host_bytes else "")
        )


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport(StreamFigures):
    """The memory and the reads of a stream; see ``sluice.stream``."""

    #: Path of the checkpoint.
    source: str
    #: Name of its format.
    format: str
    #: Device on which the weights are used.
    device: str
    #: Bytes of the weights of the whole model.
    weights_bytes: int
    #: Number of calls of the model.
    calls: int
    #: Seconds in these calls.
    seconds: float
    #: Seconds in which blocks waited for weights.
    waited_seconds: float
    #: Bytes read since the stream began, without those that stay.
    read_bytes: int
    #: How often the weights of a block were in memory, or were being read, when it was called.
    hits: int
    #: How often they were not.
    misses: int
    #: Remarks, one sentence each.
    notes: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Bytes for weights, without the staging buffers."""
        return self.resident_bytes + self.window_bytes + (self.host_bytes if self.device == "cpu" else 0)

    def sections(self) -> Iterator[Section]:
        """Yield what stays, what passes through, and what the calls took."""
        yield Strong(
            f"streams {format_bytes(self.weights_bytes)} of {checkpoint_title(self.source, self.format)} through "
            f"{format_bytes(self.memory_bytes)} on {self.device}"
        )
        yield Grid(
            ("weights", ">bytes"),
            [
                ("stay in memory", format_bytes(self.resident_bytes)),
                (f"pass through, for {counted(self.blocks, 'block')}", format_bytes(self.window_bytes)),
                *([("rest in host memory", format_bytes(self.host_bytes))] if self.host_bytes else []),
                ("read for each call", format_bytes(self.call_bytes)),
            ],
        )
        if self.calls:
            each = self.seconds / self.calls
            yield (
                f"{counted(self.calls, 'call')} of {each:.2f} s, of which {self.waited_seconds / self.calls:.2f} s "
                f"waited for weights; {format_bytes(self.read_bytes / self.calls)} read by each"
            )
            yield f"weights were there or on their way {self.hits:,} of {self.hits + self.misses:,} times"
        yield from (f"note: {note}" for note in self.notes)
