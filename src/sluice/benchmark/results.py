"""Results of a comparison as JSON and Markdown, with the rows that the terminal shows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sluice.benchmark.records import MethodRun, Outcome, Scenario, Trace
from sluice.benchmark.summary import summarise
from sluice.benchmark.table import cells_of, headings_of, notes_of

__all__ = ["as_document", "show_document", "typical_runs", "write_document", "write_results"]


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
    return {
        "command": command,
        "machine": machine,
        "scenarios": [_scenario(scenario, runs) for scenario in scenarios],
    }


def typical_runs(scenario: Scenario, runs: Sequence[MethodRun]) -> Iterator[MethodRun]:
    """Yield for each method and state of a scenario the run that represents its repetitions.

    That is the median by seconds of the successful runs; if none succeeded, the last run.
    """
    for state in scenario.states:
        for method in scenario.checkpoints:
            same = [run for run in runs if (run.scenario, run.method, run.state) == (scenario.title, method, state)]
            good = sorted((run for run in same if run.outcome.status == "ok"), key=lambda run: run.outcome.seconds)
            if same:
                yield good[(len(good) - 1) // 2] if good else same[-1]


def write_results(
    directory: Path,
    name: str,
    *,
    machine: dict[str, str],
    command: str,
    scenarios: Sequence[Scenario],
    runs: Sequence[MethodRun],
) -> dict[str, Any]:
    """Write ``NAME.json`` with all runs and ``NAME.md`` with the tables; return the content of the former.

    Args:
        directory: Directory to write to; created if it does not exist.
        name: Stem of both files.
        machine: As for ``as_document``.
        command: As for ``as_document``.
        scenarios: The scenarios.
        runs: Their runs.
    """
    document = as_document(machine=machine, command=command, scenarios=scenarios, runs=runs)
    write_document(directory, name, document, [line for each in scenarios for line in (*_markdown(each, runs), "")])
    return document


def write_document(directory: Path, name: str, document: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Write ``NAME.json``, and ``NAME.md`` with command, machine and tables.

    Args:
        directory: Directory to write to; created if it does not exist.
        name: Stem of both files.
        document: Plain values with keys ``command`` and ``machine``, as for ``as_document``.
        lines: The tables as Markdown.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    machine = (f"- {key}: {value}" for key, value in document["machine"].items())
    text = "\n".join([f"Made by `{document['command']}`.", "", *machine, "", *lines])
    (directory / f"{name}.md").write_text(text, encoding="utf-8")


def show_document(
    console: Console, directory: Path, name: str, document: Mapping[str, Any], table: Sequence[str], remark: str = ""
) -> None:
    """Write a document with one table, print the table and the paths.

    Args:
        console: Console to print to.
        directory: Directory to write to; created if it does not exist.
        name: Stem of both files.
        document: As for ``write_document``.
        table: Lines of the table, in Markdown.
        remark: Text printed after the paths.
    """
    write_document(directory, name, document, [*table, ""])
    console.print("\n".join(table), highlight=False, markup=False, soft_wrap=True)
    written = f"written: {directory}/{name}.md, {directory}/{name}.json{remark}"
    console.print(written, highlight=False, soft_wrap=True)


def _scenario(scenario: Scenario, runs: Sequence[MethodRun]) -> dict[str, Any]:
    described = dataclasses.asdict(scenario)
    # Names instead of local paths.
    described["checkpoints"] = {method: path.name for method, path in scenario.checkpoints.items()}
    described["truth"] = scenario.truth and scenario.truth.name
    return {
        **described,
        "rows": [dataclasses.asdict(row) for row in summarise(scenario, runs)],
        "runs": [
            {"method": run.method, "state": run.state, "repetition": run.repetition, **_outcome(run.outcome)}
            for run in runs
            if run.scenario == scenario.title
        ],
        "timelines": [
            {"method": run.method, "state": run.state, "repetition": run.repetition, **_trace(run.outcome.trace)}
            for run in typical_runs(scenario, runs)
            if run.outcome.trace is not None
        ],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    # A verdict holds hundreds of logits, and the row says whether they are right; timelines are listed separately.
    omitted = {"verdict", "trace"}
    names = (field.name for field in dataclasses.fields(outcome) if field.name not in omitted)
    return {name: getattr(outcome, name) for name in names}


def _trace(trace: Trace) -> dict[str, Any]:
    return {
        "seconds": [round(moment, 4) for moment in trace.seconds],
        "anon_bytes": trace.anon,
        "file_bytes": trace.file,
        "shmem_bytes": trace.shmem,
        "device_bytes": trace.device,
    }


def _markdown(scenario: Scenario, runs: Sequence[MethodRun]) -> list[str]:
    rows = summarise(scenario, runs)
    headings = ["method", *(heading.replace("\n", " ") for heading in headings_of(scenario))]
    lines = [f"### {scenario.title}", "", f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
    lines += [f"| {' | '.join([row.method, *cells_of(scenario, row)])} |" for row in rows]
    return [*lines, "", *(f"- {note}" for note in notes_of(scenario, rows, runs))]
