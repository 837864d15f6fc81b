"""Tables of scenarios: on the terminal, as Markdown and as JSON. All three show the same rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench._records import Run, Scenario, State
from bench._summary import Row, summarise
from sluice._units import format_bytes

__all__ = ["print_tables", "write_results"]

_GIB = 1 << 30

#: Width of the bar of the method that needs the most, in characters.
_BAR = 18

#: Shares of F up to which a peak is drawn green and yellow.
_LEAN, _FAIR = 1.1, 1.6

_STATE_HEADINGS: dict[State, str] = {"cold": "cold", "warm": "cached", "first": "1st", "second": "2nd", "third": "3rd"}


def _headings(scenario: Scenario) -> list[str]:
    """Return the column headings, without that of the method; each has its unit."""
    peaks = ["peak GiB", "anon", "file"]
    if scenario.device == "cuda":
        peaks = ["host GiB", "anon", "file", "GPU alloc", "GPU resv"]
    seconds = [heading for state in scenario.states for heading in _state_headings(scenario, state)]
    return [*peaks, "peak / F", *seconds, "same logits"]


def _state_headings(scenario: Scenario, state: State) -> list[str]:
    heading = f"{_STATE_HEADINGS[state]} s"
    return [heading, "/ raw"] if _has_raw(scenario) else [heading]


def _has_raw(scenario: Scenario) -> bool:
    return any(method.startswith("raw-") for method in scenario.checkpoints)


def _cells(scenario: Scenario, row: Row) -> list[str]:
    """Return the texts below ``_headings``; what was not measured is a dash."""
    peaks = [row.total_bytes, row.anon_bytes, row.file_bytes]
    if scenario.device == "cuda":
        peaks += [row.device_allocated_bytes, row.device_reserved_bytes]
    measured = row.total_bytes > 0
    texts = [f"{peak / _GIB:.2f}" if measured else "–" for peak in peaks]
    texts.append(f"{row.over_final:.2f}" if measured and row.over_final is not None else "–")
    for state in scenario.states:
        texts.append(f"{row.seconds[state]:.2f}" if state in row.seconds else _casualty(row))
        if _has_raw(scenario):
            texts.append(f"{row.over_raw[state]:.2f}" if state in row.over_raw else "–")
    texts.append({True: "yes", False: "NO", None: "–"}[row.right])
    return texts


def _casualty(row: Row) -> str:
    return "–" if row.status == "ok" else row.status


def _notes(scenario: Scenario, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines below a table: what F is, and why some cells are empty."""
    yield f"F = {format_bytes(scenario.final_bytes)}: the finished tensors"
    for row in rows:
        for reason in row.reasons:
            yield f"{row.method}: {reason}"


def print_tables(console: Console, scenarios: Sequence[Scenario], runs: Sequence[Run]) -> None:
    """Print a table for each scenario."""
    for scenario in scenarios:
        rows = summarise(scenario, runs)
        console.print(_rich_table(scenario, rows))
        for note in _notes(scenario, rows):
            console.print(Text(f"  {note}", style="dim"), soft_wrap=True)
        console.print()


def _rich_table(scenario: Scenario, rows: Sequence[Row]) -> Table:
    table = Table(title=scenario.title, title_style="bold", title_justify="left", box=ROUNDED, header_style="bold")
    table.add_column("method", no_wrap=True)
    table.add_column("anon █ file ░", no_wrap=True, min_width=_BAR)
    for heading in _headings(scenario):
        table.add_column(heading, justify="right", no_wrap=True)
    largest = max([row.total_bytes for row in rows] + [1])
    for row in rows:
        ours = row.method.startswith("sluice")
        cells = [
            _styled(heading, cell, row)
            for heading, cell in zip(_headings(scenario), _cells(scenario, row), strict=True)
        ]
        table.add_row(
            Text(row.method, "bold cyan" if ours else ""), _bar(row, largest), *cells, style="bold" if ours else ""
        )
    return table


def _styled(heading: str, cell: str, row: Row) -> Text:
    if cell in {"NO", "killed", "failed", "timeout"}:
        return Text(cell, "bold red")
    if cell == "absent":
        return Text(cell, "dim")
    return Text(cell, _colour(row) if heading == "peak / F" else "")


def _colour(row: Row) -> str:
    if row.over_final is None:
        return "dim"
    return "green" if row.over_final <= _LEAN else "yellow" if row.over_final <= _FAIR else "red"


def _bar(row: Row, largest: int) -> Text:
    """Return the peak as a bar: anonymous memory solid, file pages shaded."""
    length = round(_BAR * row.total_bytes / largest)
    shaded = min(length, round(_BAR * row.file_bytes / largest))
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
    headings = ["method", *_headings(scenario)]
    lines = [f"### {scenario.title}", "", f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
    lines += [f"| {' | '.join([row.method, *_cells(scenario, row)])} |" for row in rows]
    return [*lines, "", *(f"- {note}" for note in _notes(scenario, rows))]
