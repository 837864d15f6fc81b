"""Render the rows of a scenario: as texts, and as a table for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice._units import format_bytes
from sluice.benchmark.records import MethodRun, Scenario, State
from sluice.benchmark.summary import Row, summarise

__all__ = ["ALARMING", "cells_of", "console_for_tables", "headings_of", "notes_of", "print_tables"]

_GIB = 1 << 30

#: Width of the longest bar, in characters.
_BAR = 18

#: Smallest useful width of the longest bar, in characters.
_NARROWEST_BAR = 8

#: Columns of the terminal that the table needs in addition to the bar.
_COLUMNS_BESIDE_BAR = 82

#: Width if the output is not a terminal.
_UNBOUNDED_COLUMNS = 160

#: Heading of the colored column.
_RATIO = "peak\n/ F"

#: Texts of cells that report a failure.
ALARMING = ("NO", "killed", "failed", "timeout")

#: Text of a figure that was not measured.
_NOTHING = "-"

#: Largest ratio of peak to F that is drawn green, and yellow.
_LEAN, _FAIR = 1.1, 1.6


def headings_of(scenario: Scenario) -> list[str]:
    """Return the column headings except that of the method: the name on one line and the unit on the next."""
    peaks = ["host\nGiB", "anon\nGiB", "file\nGiB"]
    if scenario.device != "cpu":
        peaks += ["GPU\nalloc", "GPU\nresv"]
    seconds = [heading for state in scenario.states for heading in _state_headings(scenario, state)]
    return [*peaks, _RATIO, *seconds, "same\nlogits" if scenario.builtin else "same\nweights"]


def _state_headings(scenario: Scenario, state: State) -> list[str]:
    return [f"{state}\ns", f"{state}\n/ raw"] if _has_raw(scenario) else [f"{state}\ns"]


def _has_raw(scenario: Scenario) -> bool:
    return any(method.startswith("raw-") for method in scenario.checkpoints)


def cells_of(scenario: Scenario, row: Row) -> list[str]:
    """Return the texts of the cells, in the order of ``headings_of``; a dash means not measured."""
    peaks = [row.total_bytes, row.anon_bytes, row.file_bytes]
    if scenario.device != "cpu":
        peaks += [row.device_allocated_bytes, row.device_reserved_bytes]
    measured = row.total_bytes > 0
    texts = [f"{peak / _GIB:.2f}" if measured else _NOTHING for peak in peaks]
    texts.append(f"{row.over_final:.2f}" if measured and row.over_final is not None else _NOTHING)
    for state in scenario.states:
        texts.append(f"{row.seconds[state]:.2f}" if state in row.seconds else row.failures[state])
        if _has_raw(scenario):
            texts.append(f"{row.over_raw[state]:.2f}" if state in row.over_raw else _NOTHING)
    texts.append({True: "yes", False: "NO", None: _NOTHING}[row.right])
    return texts


def notes_of(scenario: Scenario, rows: Sequence[Row], runs: Sequence[MethodRun]) -> Iterator[str]:
    """Yield the notes below a table: the value of F, the memory limit and the reasons of failures."""
    yield f"F = {format_bytes(scenario.final_bytes)}: the finished tensors"
    if scenario.host_limit_bytes is not None:
        yield f"host memory limit of each process, interpreter included: {format_bytes(scenario.host_limit_bytes)}"
    truth = next((run for run in runs if (run.scenario, run.method) == (scenario.title, scenario.reference)), None)
    if truth is not None and truth.outcome.status != "ok":
        yield f"no reference to compare with: {truth.outcome.reason}"
    for row in rows:
        for reason in row.reasons:
            yield f"{row.method}: {reason}"


def console_for_tables(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or wide enough for every table if there is none."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(width=None if terminal else _UNBOUNDED_COLUMNS, stderr=stderr)


def print_tables(console: Console, scenarios: Sequence[Scenario], runs: Sequence[MethodRun]) -> None:
    """Print a table per scenario."""
    for scenario in scenarios:
        rows = summarise(scenario, runs)
        console.print(_rich_table(scenario, rows, bar=min(_BAR, console.width - _COLUMNS_BESIDE_BAR)))
        for note in notes_of(scenario, rows, runs):
            console.print(Text(f"  {note}", style="dim"), soft_wrap=True)
        console.print()


def _rich_table(scenario: Scenario, rows: Sequence[Row], *, bar: int) -> Table:
    """Return the table; ``bar`` is the width of the bar of the largest peak, which is omitted if too narrow."""
    title = Text(scenario.title, "bold")  # no markup: it contains names of files and models
    table = Table(title=title, title_justify="left", box=ROUNDED, header_style="bold")
    table.add_column("method", no_wrap=True)
    drawn = bar >= _NARROWEST_BAR
    if drawn:
        table.add_column("peak\n█ anon ░ file", no_wrap=True, min_width=bar)
    headings = headings_of(scenario)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    largest = max([row.total_bytes for row in rows] + [1])
    for row in rows:
        name = Text(row.method, "bold cyan" if _is_ours(row) else "")
        cells = [_styled(heading, cell, row) for heading, cell in zip(headings, cells_of(scenario, row), strict=True)]
        bars = [_bar(row, bar / largest)] if drawn else []
        table.add_row(name, *bars, *cells, style="bold" if _is_ours(row) else "")
    return table


def _is_ours(row: Row) -> bool:
    return row.method.startswith("sluice")


def _styled(heading: str, cell: str, row: Row) -> Text:
    if cell in ALARMING:
        return Text(cell, "bold red")
    if cell == "yes":
        return Text(cell, "green")
    if cell in {"absent", _NOTHING}:
        return Text(cell, "dim")
    return Text(cell, _colour(row) if heading == _RATIO else "")


def _colour(row: Row) -> str:
    if row.over_final is None:
        return "dim"
    return "green" if row.over_final <= _LEAN else "yellow" if row.over_final <= _FAIR else "red"


def _bar(row: Row, scale: float) -> Text:
    """Return the peak as a bar: anonymous memory solid, file pages shaded. ``scale`` is in characters per byte."""
    length = round(row.total_bytes * scale)
    shaded = min(length, round(row.file_bytes * scale))
    return Text("█" * (length - shaded) + "░" * shaded, _colour(row))
