"""Results of a comparison as JSON, as Markdown, and as a page: ``report.html``, which works offline.

The page embeds the JSON, its style and uPlot (50 kB, MIT licence in ``assets``), which draws memory over time.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice._units import format_bytes
from sluice.benchmark.methods import METHODS
from sluice.benchmark.records import REFERENCE, MethodRun, Scenario, State
from sluice.benchmark.runner import Row, finding, summarise, typical_runs

__all__ = [
    "TableSection",
    "as_document",
    "console_for_tables",
    "print_section",
    "section_of",
    "write_document",
    "write_report",
]

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


#: Fields of an outcome that its run in the JSON leaves out: timelines are listed separately.
_OMITTED = {"verdict", "trace", "facts"}


def as_document(
    *, machine: dict[str, str], command: str, scenarios: Sequence[Scenario], runs: Sequence[MethodRun]
) -> dict[str, Any]:
    """Return all results as plain values for ``json.dumps``.

    Args:
        machine: The result of ``machine.describe``.
        command: The command that reproduces the tables.
        scenarios: The scenarios.
        runs: Their runs.
    """
    return {"command": command, "machine": machine, "scenarios": [_scenario(each, runs) for each in scenarios]}


def _scenario(scenario: Scenario, runs: Sequence[MethodRun]) -> dict[str, Any]:
    rows = summarise(scenario, runs)
    return {
        **dataclasses.asdict(scenario),
        # Names instead of local paths.
        "checkpoints": {method: path.name for method, path in scenario.checkpoints.items()},
        "truth": scenario.truth and scenario.truth.name,
        "findings": {state: finding(scenario, state, rows) for state in scenario.states},
        "rows": [dataclasses.asdict(row) for row in rows],
        "runs": [_run(run) for run in runs if run.scenario == scenario.title],
        "timelines": [_timeline(run) for run in typical_runs(scenario, runs) if run.outcome.trace is not None],
    }


def _run(run: MethodRun) -> dict[str, Any]:
    outcome = {name: value for name, value in dataclasses.asdict(run.outcome).items() if name not in _OMITTED}
    return {"method": run.method, "state": run.state, "repetition": run.repetition, **outcome}


def _timeline(run: MethodRun) -> dict[str, Any]:
    trace = run.outcome.trace
    assert trace is not None
    columns = {f"{kind}_bytes": getattr(trace, kind) for kind in ("anon", "file", "shmem", "device")}
    seconds = [round(moment, 4) for moment in trace.seconds]
    return {"method": run.method, "state": run.state, "repetition": run.repetition, "seconds": seconds, **columns}


def write_document(directory: Path, name: str, document: Mapping[str, Any], sections: Sequence[TableSection]) -> None:
    """Write ``NAME.json``, and ``NAME.md`` with command, machine and tables.

    Args:
        directory: Directory to write to; created if it does not exist.
        name: Stem of both files.
        document: Plain values with keys ``command`` and ``machine``, as for ``as_document``.
        sections: The tables.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    machine = (f"- {key}: {value}" for key, value in document["machine"].items())
    lines = [f"Made by `{document['command']}`.", "", *machine, ""]
    lines += [line for section in sections for line in section.markdown()]
    (directory / f"{name}.md").write_text("\n".join(lines), encoding="utf-8", errors="backslashreplace")


def write_report(
    path: Path, document: Mapping[str, Any], scenarios: Sequence[Scenario], runs: Sequence[MethodRun]
) -> None:
    """Write the page.

    Args:
        path: The file.
        document: The result of ``as_document``.
        scenarios: Its scenarios.
        runs: Their runs.

    Raises:
        ImportError: jinja2 is not installed; torch brings it.
    """
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    assets = resources.files("sluice.benchmark") / "assets"
    files = ("uPlot.min.css", "uPlot.iife.min.js", "report.css", "report.js")
    environment = Environment(loader=PackageLoader("sluice.benchmark", "assets"), autoescape=True)
    page = environment.get_template("report.html").render(
        document=document,
        tables=[section_of(each, runs) for each in scenarios],
        methods={method: METHODS[method].summary for each in scenarios for method in each.checkpoints},
        assets={name: Markup((assets / name).read_text(encoding="utf-8")) for name in files},  # noqa: S704  our own
    )
    path.write_text(page, encoding="utf-8", errors="backslashreplace")  # names of files may be any bytes
