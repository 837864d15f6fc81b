"""Progress of a load: events for a caller's function, and the progress bar of ``progress=True``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from sluice._public import call_started, public
from sluice._units import gb_per_second

__all__ = ["Progress", "ProgressEvent", "ProgressFunction", "byte_progress"]

#: Seconds between two drawings of the bar. Drawing takes about a millisecond, and events come once for each read.
_REDRAW_SECONDS = 0.1

#: Widths of the bar and of the description before it, in characters. With bytes, speed and time left they fit 80
#: columns; a longer description would push the other columns off the line.
_BAR_COLUMNS, _DESCRIPTION_COLUMNS = 16, 24


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """Progress of a load: bytes done, bytes in total, seconds.

    Example:
        >>> ProgressEvent(done_bytes=512, total_bytes=2048, seconds=0.5).fraction
        0.25
    """

    #: Bytes already in their final place.
    done_bytes: int
    #: Bytes in their final place at the end of the load.
    total_bytes: int
    #: Seconds since the load began.
    seconds: float

    @property
    def fraction(self) -> float:
        """Share of the bytes that are done, from 0 to 1; 1 for an empty load."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0


ProgressFunction: TypeAlias = Callable[[ProgressEvent], None]

#: Type of every ``progress=`` argument: False draws nothing, True draws a bar, a function is called with each event.
Progress: TypeAlias = bool | ProgressFunction


@contextmanager
def byte_progress(progress: Progress, description: str, total_bytes: int) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that reports the number of bytes read so far to ``progress``; None if progress is off."""
    started = call_started()  # not the first read: the report counts from there too
    if progress is False:
        yield None
        return
    with _bar(description) if progress is True else nullcontext(progress) as sink:

        def report(done_bytes: int) -> None:
            sink(ProgressEvent(done_bytes=done_bytes, total_bytes=total_bytes, seconds=time.monotonic() - started))

        yield report


def _shortened(description: str) -> str:
    """Return the end of a long description: the end of a path is more specific than its beginning."""
    return description if len(description) <= _DESCRIPTION_COLUMNS else f"…{description[1 - _DESCRIPTION_COLUMNS :]}"


@contextmanager
def _bar(description: str) -> Iterator[ProgressFunction]:
    """Yield a function that draws a bar of bytes, speed and time left on stderr."""
    # Imported here because rich takes 50 ms to import and only the bar needs it.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    class Quiet(Console):
        """Writes nothing once the reader of stderr is gone, where rich ends the process: the load continues."""

        def on_broken_pipe(self) -> None:
            self.quiet = True

        def _check_buffer(self) -> None:
            try:
                super()._check_buffer()
            except (OSError, ValueError):  # ValueError: it is closed
                self.quiet = True

    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR_COLUMNS),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[speed]:.2f} GB/s"),
        TimeRemainingColumn(),
        console=Quiet(stderr=True),
        auto_refresh=False,  # rich's refresh thread is not joined: it could outlive the load
        redirect_stdout=False,  # or what other code prints meanwhile goes to stderr, folded to its width
    )
    task = bar.add_task(_shortened(description), total=None, speed=0.0)
    drawn = 0.0

    def draw(event: ProgressEvent) -> None:
        nonlocal drawn
        now = time.monotonic()
        due = event.done_bytes >= event.total_bytes or now - drawn >= _REDRAW_SECONDS
        if due:
            drawn = now
        speed = gb_per_second(event.done_bytes, event.seconds)
        bar.update(task, completed=event.done_bytes, total=event.total_bytes, speed=speed, refresh=due)

    with bar:
        yield draw
