"""Tables as text: one record for the terminal, Markdown and the page, and the table of a scenario."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice._units import format_bytes
from sluice.benchmark.records import MethodRun, Scenario, State
from sluice.benchmark.summary import Row, summarise

__all__ = ["ALARMING", "TableSection", "console_for_tables", "print_section", "print_tables", "section_of"]

_GIB = 1 << 30

#: Width of the longest bar, in characters; the smallest useful one; columns for the rest of the table.
_BAR, _NARROWEST_BAR, _COLUMNS_BESIDE_BAR = 18, 8, 82

#: Width if the output is not a terminal.
_UNBOUNDED_COLUMNS = 160

#: Heading of the colored column.
_RATIO = "peak\n/ F"

#: Texts of cells that report a failure.
ALARMING = ("NO", "no", "missed", "killed", "failed", "timeout")

#: Text of a figure that was not measured.
_NOTHING = "-"

_STYLES = {
    **dict.fromkeys(ALARMING, "bold red"),
    "yes": "green",
    "reached": "green",
    "absent": "dim",
    "skipped": "dim",
    _NOTHING: "dim",
}

#: Largest ratio of peak to F that is drawn green, and yellow.
_LEAN, _FAIR = 1.1, 1.6


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSection:
    """A table of texts."""

    #: Its heading.
    title: str
    #: The headings of its columns; the name on one line and the unit on the next.
    headings: tuple[str, ...]
    #: Its cells; the first cell of each row is its name.
    rows: tuple[tuple[str, ...], ...]
    #: Sentences below it.
    notes: tuple[str, ...] = ()

    def flat_headings(self) -> list[str]:
        """Return the headings on one line each."""
        return [heading.replace("\n", " ") for heading in self.headings]

    def markdown(self) -> list[str]:
        """Return its lines in Markdown."""
        lines = [f"### {self.title}", ""] if self.title else []
        lines += [f"| {' | '.join(self.flat_headings())} |", "|---|" + "---:|" * (len(self.headings) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return [*lines, "", *(f"- {note}" for note in self.notes), *[""] * bool(self.notes)]


def section_of(scenario: Scenario, runs: Sequence[MethodRun]) -> TableSection:
    """Return the table of a scenario; a dash means not measured."""
    rows = summarise(scenario, runs)
    raw = any(method.startswith("raw-") for method in scenario.checkpoints)
    peaks = ["host\nGiB", "anon\nGiB", "file\nGiB", *(["GPU\nalloc", "GPU\nresv"] if scenario.device != "cpu" else [])]
    seconds = [head for state in scenario.states for head in (f"{state}\ns", f"{state}\n/ raw")[: 1 + raw]]
    right = "same\nlogits" if scenario.builtin else "same\nweights"
    on_device = scenario.device != "cpu"
    return TableSection(
        title=scenario.title,
        headings=("method", *peaks, _RATIO, *seconds, right),
        rows=tuple((row.method, *_cells(row, scenario.states, on_device=on_device, raw=raw)) for row in rows),
        notes=tuple(_notes(scenario, rows, runs)),
    )


def _cells(row: Row, states: Sequence[State], *, on_device: bool, raw: bool) -> Iterator[str]:
    peaks = [row.total_bytes, row.anon_bytes, row.file_bytes]
    peaks += [row.device_allocated_bytes, row.device_reserved_bytes] if on_device else []
    measured = row.total_bytes > 0
    yield from (f"{peak / _GIB:.2f}" if measured else _NOTHING for peak in peaks)
    yield f"{row.over_final:.2f}" if measured and row.over_final is not None else _NOTHING
    for state in states:
        yield f"{row.seconds[state]:.2f}" if state in row.seconds else row.failures[state]
        if raw:
            yield f"{row.over_raw[state]:.2f}" if state in row.over_raw else _NOTHING
    yield {True: "yes", False: "NO", None: _NOTHING}[row.right]


def _notes(scenario: Scenario, rows: Sequence[Row], runs: Sequence[MethodRun]) -> Iterator[str]:
    yield f"F = {format_bytes(scenario.final_bytes)}: the finished tensors"
    if scenario.host_limit_bytes is not None:
        yield f"host memory limit of each process, interpreter included: {format_bytes(scenario.host_limit_bytes)}"
    truth = next((run for run in runs if (run.scenario, run.method) == (scenario.title, scenario.reference)), None)
    if truth is not None and truth.outcome.status != "ok":
        yield f"no reference to compare with: {truth.outcome.reason}"
    for row in rows:
        yield from (f"{row.method}: {reason}" for reason in row.reasons)


def console_for_tables(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or wide enough for every table if there is none."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(width=None if terminal else _UNBOUNDED_COLUMNS, stderr=stderr)


def print_tables(console: Console, scenarios: Sequence[Scenario], runs: Sequence[MethodRun]) -> None:
    """Print a table per scenario, with its peaks as bars if the console is wide enough."""
    width = min(_BAR, console.width - _COLUMNS_BESIDE_BAR)
    for scenario in scenarios:
        rows = summarise(scenario, runs)
        largest = max([row.total_bytes for row in rows] + [1])
        bars = [_bar(row, width / largest) for row in rows] if width >= _NARROWEST_BAR else None
        print_section(console, section_of(scenario, runs), bars=bars)


def print_section(console: Console, section: TableSection, *, bars: Sequence[Text] | None = None) -> None:
    """Print a table; names that begin with "sluice" are emphasized.

    Args:
        console: Where to print.
        section: The table.
        bars: Bar of each row; None for none.
    """
    title = Text(section.title, "bold")  # no markup: it contains names of files and models
    table = Table(title=title, title_justify="left", box=ROUNDED, header_style="bold")
    table.add_column(section.headings[0], no_wrap=True)
    if bars is not None:
        table.add_column("peak\n█ anon ░ file", no_wrap=True, min_width=max(map(len, bars), default=0))
    for heading in section.headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, (name, *cells) in enumerate(section.rows):
        ours = "bold" if name.startswith("sluice") else ""
        styled = [_styled(heading, cell) for heading, cell in zip(section.headings[1:], cells, strict=True)]
        drawn = [bars[number]] if bars is not None else []
        table.add_row(Text(name, "bold cyan" if ours else ""), *drawn, *styled, style=ours)
    console.print(table)
    for note in section.notes:
        console.print(Text(f"  {note}", style="dim"), soft_wrap=True)
    console.print()


def _styled(heading: str, cell: str) -> Text:
    if heading == _RATIO and cell != _NOTHING:
        return Text(cell, _colour(float(cell)))
    return Text(cell, _STYLES.get(cell, ""))


def _colour(over_final: float | None) -> str:
    if over_final is None:
        return "dim"
    return "green" if over_final <= _LEAN else "yellow" if over_final <= _FAIR else "red"


def _bar(row: Row, scale: float) -> Text:
    """Return the peak as a bar: anonymous memory solid, file pages shaded. ``scale`` is in characters per byte."""
    length = round(row.total_bytes * scale)
    shaded = min(length, round(row.file_bytes * scale))
    return Text("█" * (length - shaded) + "░" * shaded, _colour(row.over_final))
