"""Tables of scenarios: on the terminal, as Markdown and as JSON. All three show the same rows."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice._units import format_bytes
from sluice.benchmark._records import Run, Scenario, State
from sluice.benchmark._summary import Row, summarise

__all__ = ["console_for_tables", "print_tables", "write_results"]

_GIB = 1 << 30

#: Width of the bar of the method that needs the most, in characters.
_BAR = 18

#: A shorter one says nothing.
_NARROWEST_BAR = 8

#: Columns of the terminal that the table needs beside the bar.
_COLUMNS_BESIDE_BAR = 82

#: Width where the output is no terminal.
_UNBOUNDED_COLUMNS = 160

#: Heading of the column that the colours judge.
_RATIO = "peak\n/ F"

#: What stands for a figure that was not measured.
_NOTHING = "-"

#: Shares of F up to which a peak is drawn green and yellow.
_LEAN, _FAIR = 1.1, 1.6


def _headings(scenario: Scenario) -> list[str]:
    """Return the column headings, without that of the method: name and unit, each a line."""
    peaks = ["host\nGiB", "anon\nGiB", "file\nGiB"]
    if scenario.device == "cuda":
        peaks += ["GPU\nalloc", "GPU\nresv"]
    seconds = [heading for state in scenario.states for heading in _state_headings(scenario, state)]
    return [*peaks, _RATIO, *seconds, "same\nlogits"]


def _state_headings(scenario: Scenario, state: State) -> list[str]:
    return [f"{state}\ns", f"{state}\n/ raw"] if _has_raw(scenario) else [f"{state}\ns"]


def _has_raw(scenario: Scenario) -> bool:
    return any(method.startswith("raw-") for method in scenario.checkpoints)


def _cells(scenario: Scenario, row: Row) -> list[str]:
    """Return the texts below ``_headings``; what was not measured is a dash."""
    peaks = [row.total_bytes, row.anon_bytes, row.file_bytes]
    if scenario.device == "cuda":
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


def _notes(scenario: Scenario, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines below a table: what F is, and why some cells are empty."""
    yield f"F = {format_bytes(scenario.final_bytes)}: the finished tensors"
    for row in rows:
        for reason in row.reasons:
            yield f"{row.method}: {reason}"


def console_for_tables() -> Console:
    """Return a console as wide as the terminal; where there is none, wide enough for every table."""
    return Console(width=None if sys.stdout.isatty() else _UNBOUNDED_COLUMNS)


def print_tables(console: Console, scenarios: Sequence[Scenario], runs: Sequence[Run]) -> None:
    """Print a table for each scenario."""
    for scenario in scenarios:
        rows = summarise(scenario, runs)
        console.print(_rich_table(scenario, rows, bar=min(_BAR, console.width - _COLUMNS_BESIDE_BAR)))
        for note in _notes(scenario, rows):
            console.print(Text(f"  {note}", style="dim"), soft_wrap=True)
        console.print()


def _rich_table(scenario: Scenario, rows: Sequence[Row], *, bar: int) -> Table:
    """Return the table, with a bar of this many characters for the largest peak if that is enough to see anything."""
    table = Table(title=scenario.title, title_style="bold", title_justify="left", box=ROUNDED, header_style="bold")
    table.add_column("method", no_wrap=True)
    drawn = bar >= _NARROWEST_BAR
    if drawn:
        table.add_column("peak\n█ anon ░ file", no_wrap=True, min_width=bar)
    headings = _headings(scenario)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    largest = max([row.total_bytes for row in rows] + [1])
    for row in rows:
        name = Text(row.method, "bold cyan" if _is_ours(row) else "")
        cells = [_styled(heading, cell, row) for heading, cell in zip(headings, _cells(scenario, row), strict=True)]
        bars = [_bar(row, bar / largest)] if drawn else []
        table.add_row(name, *bars, *cells, style="bold" if _is_ours(row) else "")
    return table


def _is_ours(row: Row) -> bool:
    return row.method.startswith("sluice")


def _styled(heading: str, cell: str, row: Row) -> Text:
    if cell in {"NO", "killed", "failed", "timeout"}:
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
    """Return the peak as a bar: anonymous memory solid, file pages shaded. ``scale`` is characters for a byte."""
    length = round(row.total_bytes * scale)
    shaded = min(length, round(row.file_bytes * scale))
    return Text("█" * (length - shaded) + "░" * shaded, _colour(row))


def write_results(
    directory: Path,
    name: str,
    *,
    machine: dict[str, str],
    command: str,
    scenarios: Sequence[Scenario],
    runs: Sequence[Run],
) -> None:
    """Write ``NAME.json`` with every run and ``NAME.md`` with the tables into a directory, which is made.

    Args:
        directory: Where to write.
        name: Stem of the two files.
        machine: What ``_machine.describe`` says.
        command: The command that makes these tables again.
        scenarios: What was run.
        runs: What came of it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    document = {
        "command": command,
        "machine": machine,
        "scenarios": [_as_json(scenario, runs) for scenario in scenarios],
    }
    (directory / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    lines = [f"Made by `{command}`.", "", *(f"- {key}: {value}" for key, value in machine.items()), ""]
    for scenario in scenarios:
        lines += [*_markdown(scenario, summarise(scenario, runs)), ""]
    (directory / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")


def _as_json(scenario: Scenario, runs: Sequence[Run]) -> dict[str, Any]:
    described = dataclasses.asdict(scenario)
    described["checkpoints"] = {method: path.name for method, path in scenario.checkpoints.items()}
    return {
        **described,
        "rows": [dataclasses.asdict(row) for row in summarise(scenario, runs)],
        "runs": [_run_as_json(run) for run in runs if run.scenario == scenario.title],
    }


def _run_as_json(run: Run) -> dict[str, Any]:
    outcome = dataclasses.asdict(run.outcome)
    del outcome["verdict"]  # hundreds of logits; the row says whether they were right
    return {"method": run.method, "state": run.state, "repetition": run.repetition, **outcome}


def _markdown(scenario: Scenario, rows: Sequence[Row]) -> list[str]:
    headings = ["method", *(heading.replace("\n", " ") for heading in _headings(scenario))]
    lines = [f"### {scenario.title}", "", f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
    lines += [f"| {' | '.join([row.method, *_cells(scenario, row)])} |" for row in rows]
    return [*lines, "", *(f"- {note}" for note in _notes(scenario, rows))]
