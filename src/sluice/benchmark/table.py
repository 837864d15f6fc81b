"""Tables as text, for the terminal, Markdown and the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice._units import format_bytes
from sluice.benchmark.records import REFERENCE, MethodRun, Scenario, State
from sluice.benchmark.summary import Row, summarise

__all__ = ["TableSection", "console_for_tables", "print_section", "section_of"]

_GIB = 1 << 30

#: Width if the output is not a terminal.
_UNBOUNDED_COLUMNS = 160

#: Text of a figure that was not measured.
_NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSection:
    """A table of texts."""

    #: Its heading.
    title: str
    #: The headings of its columns.
    headings: tuple[str, ...]
    #: Its cells; the first cell of each row is its name.
    rows: tuple[tuple[str, ...], ...]
    #: Sentences below it.
    notes: tuple[str, ...] = ()

    def markdown(self) -> list[str]:
        """Return its lines in Markdown."""
        lines = [f"### {self.title}", ""] if self.title else []
        lines += [f"| {' | '.join(self.headings)} |", "|---|" + "---:|" * (len(self.headings) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return [*lines, "", *(f"- {note}" for note in self.notes), *[""] * bool(self.notes)]


def section_of(scenario: Scenario, runs: Sequence[MethodRun]) -> TableSection:
    """Return the table of a scenario; a dash means not measured."""
    rows = summarise(scenario, runs)
    on_device = scenario.device != "cpu"
    peaks = ["host GiB", "anon GiB", "file GiB", *(["GPU alloc", "GPU resv"] if on_device else [])]
    return TableSection(
        title=scenario.title,
        headings=("method", *peaks, "peak / F", *(f"{state} s" for state in scenario.states), "right"),
        rows=tuple((row.method, *_cells(row, scenario.states, on_device=on_device)) for row in rows),
        notes=tuple(_notes(scenario, rows, runs)),
    )


def _cells(row: Row, states: Sequence[State], *, on_device: bool) -> Iterator[str]:
    peaks = [row.total_bytes, row.anon_bytes, row.file_bytes]
    peaks += [row.device_allocated_bytes, row.device_reserved_bytes] if on_device else []
    measured = row.total_bytes > 0
    yield from (f"{peak / _GIB:.2f}" if measured else _NOTHING for peak in peaks)
    yield f"{row.over_final:.2f}" if measured and row.over_final is not None else _NOTHING
    for state in states:
        yield f"{row.seconds[state]:.2f}" if state in row.seconds else row.failures[state]
    yield {True: "yes", False: "NO", None: _NOTHING}[row.right]


def _notes(scenario: Scenario, rows: Sequence[Row], runs: Sequence[MethodRun]) -> Iterator[str]:
    yield f"F = {format_bytes(scenario.final_bytes)}: the finished tensors"
    if scenario.host_limit_bytes is not None:
        yield f"host memory limit of each process, interpreter included: {format_bytes(scenario.host_limit_bytes)}"
    truth = next((run for run in runs if (run.scenario, run.method) == (scenario.title, REFERENCE)), None)
    if truth is not None and truth.outcome.status != "ok":
        yield f"no reference to compare with: {truth.outcome.reason}"
    for row in rows:
        yield from (f"{row.method}: {reason}" for reason in row.reasons)


def console_for_tables(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or wide enough for every table if there is none."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(width=None if terminal else _UNBOUNDED_COLUMNS, stderr=stderr)


def print_section(console: Console, section: TableSection) -> None:
    """Print a table; rows whose names begin with "sluice" are bold."""
    table = Table(title=Text(section.title), title_justify="left")  # Text: a name is not markup
    for number, heading in enumerate(section.headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=not number)
    for row in section.rows:
        table.add_row(*map(Text, row), style="bold" if row[0].startswith("sluice") else "")
    console.print(table)
    for note in section.notes:
        console.print(Text(f"  {note}"), soft_wrap=True)
    console.print()
