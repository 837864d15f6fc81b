"""Results of a comparison as JSON and Markdown, with the rows that the terminal shows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sluice.benchmark.records import MethodRun, Outcome, Scenario, Trace
from sluice.benchmark.summary import summarise, typical_runs
from sluice.benchmark.table import TableSection, print_section, section_of

__all__ = ["as_document", "show_document", "write_document", "write_results"]


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


def write_results(
    directory: Path,
    name: str,
    *,
    machine: dict[str, str],
    command: str,
    scenarios: Sequence[Scenario],
    runs: Sequence[MethodRun],
    sections: Sequence[TableSection] = (),
) -> dict[str, Any]:
    """Write ``NAME.json`` with all runs and ``NAME.md`` with the tables; return the content of the former.

    Args:
        directory: Directory to write to; created if it does not exist.
        name: Stem of both files.
        machine: As for ``as_document``; so are ``command``, ``scenarios`` and ``runs``.
        command: The command.
        scenarios: The scenarios.
        runs: Their runs.
        sections: Further tables.
    """
    document = as_document(machine=machine, command=command, scenarios=scenarios, runs=runs)
    document |= {"sections": [dataclasses.asdict(each) for each in sections]} if sections else {}
    write_document(directory, name, document, [*(section_of(each, runs) for each in scenarios), *sections])
    return document


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
    (directory / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")


def show_document(
    console: Console, directory: Path, name: str, document: Mapping[str, Any], sections: Sequence[TableSection]
) -> None:
    """Write a document as ``write_document``, and print the tables and the paths."""
    write_document(directory, name, document, sections)
    for section in sections:
        print_section(console, section)
    console.print(f"written: {directory}/{name}.md, {directory}/{name}.json", highlight=False, soft_wrap=True)


def _scenario(scenario: Scenario, runs: Sequence[MethodRun]) -> dict[str, Any]:
    described = dataclasses.asdict(scenario)
    # Names instead of local paths.
    described["checkpoints"] = {method: path.name for method, path in scenario.checkpoints.items()}
    described["truth"] = scenario.truth and scenario.truth.name
    own = [run for run in runs if run.scenario == scenario.title]
    typical = [run for run in typical_runs(scenario, runs) if run.outcome.trace is not None]
    return {
        **described,
        "rows": [dataclasses.asdict(row) for row in summarise(scenario, runs)],
        "runs": [{**_named(run), **_outcome(run.outcome)} for run in own],
        "timelines": [{**_named(run), **_trace(run.outcome.trace)} for run in typical if run.outcome.trace is not None],
    }


def _named(run: MethodRun) -> dict[str, Any]:
    return {"method": run.method, "state": run.state, "repetition": run.repetition}


def _outcome(outcome: Outcome) -> dict[str, Any]:
    # A verdict holds hundreds of logits, and the row says whether they are right; timelines are listed separately.
    omitted = {"verdict", "trace", "facts"}
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
