"""Results of a comparison as JSON, as Markdown, and as a page: ``report.html``, which works offline.

The page embeds the JSON, its style and uPlot (50 kB, MIT licence in ``assets``), which draws memory over time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from sluice.benchmark.methods import METHODS
from sluice.benchmark.records import MethodRun, Scenario
from sluice.benchmark.summary import finding, summarise, typical_runs
from sluice.benchmark.table import TableSection, section_of

__all__ = ["as_document", "write_document", "write_report"]

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
    (directory / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")


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
    path.write_text(page, encoding="utf-8")
