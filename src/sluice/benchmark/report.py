"""``report.html``: a self-contained page with the chart, the tables, the machine and the command.

The page embeds its data, its style and uPlot (50 kB, MIT licence in ``assets``), which draws the chart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from sluice._units import format_bytes
from sluice.benchmark.headline import explain_final_bytes, finding, findings, headline
from sluice.benchmark.methods import METHODS
from sluice.benchmark.records import MethodRun, Scenario
from sluice.benchmark.summary import typical_runs
from sluice.benchmark.table import ALARMING, section_of

__all__ = ["write_report"]


def write_report(
    path: Path,
    *,
    title: str,
    machine: dict[str, str],
    command: str,
    scenarios: Sequence[Scenario],
    runs: Sequence[MethodRun],
) -> None:
    """Write the page.

    Args:
        path: The file.
        title: What was loaded, such as ``"GPT-2 large, fp32 checkpoint"``.
        machine: The result of ``machine.describe``.
        command: The command that reproduces the page.
        scenarios: The scenarios.
        runs: Their runs.

    Raises:
        ImportError: jinja2 is not installed; torch brings it.
    """
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    assets = resources.files("sluice.benchmark") / "assets"

    def raw(name: str) -> Markup:
        return Markup((assets / name).read_text(encoding="utf-8"))  # noqa: S704  our own files and uPlot's

    environment = Environment(loader=PackageLoader("sluice.benchmark", "assets"), autoescape=True)
    page = environment.get_template("report.html").render(
        subject=title,
        headline=headline(title.partition(",")[0], scenarios, runs),
        final_bytes=explain_final_bytes(scenarios),
        machine=machine,
        command=command,
        findings=list(findings(scenarios, runs)),
        tables=[_table(scenario, runs) for scenario in scenarios],
        methods=list(_summaries(scenarios)),
        alarming=ALARMING,
        data=_data(scenarios, runs),
        uplot_css=raw("uPlot.min.css"),
        uplot_js=raw("uPlot.iife.min.js"),
        css=raw("report.css"),
        js=raw("report.js"),
    )
    path.write_text(page, encoding="utf-8")


def _table(scenario: Scenario, runs: Sequence[MethodRun]) -> dict[str, Any]:
    section = section_of(scenario, runs)
    _, *headings = section.flat_headings()
    rows = [{"method": name, "kind": _row_kind(name, cells), "cells": cells} for name, *cells in section.rows]
    return {"title": section.title, "headings": headings, "rows": rows, "notes": section.notes}


def _row_kind(method: str, cells: Sequence[str]) -> str:
    if method.startswith("sluice"):
        return "ours"
    return "absent" if "absent" in cells else ""


def _summaries(scenarios: Sequence[Scenario]) -> Iterator[tuple[str, str]]:
    for method in dict.fromkeys(method for scenario in scenarios for method in scenario.checkpoints):
        yield method, METHODS[method].summary


def _data(scenarios: Sequence[Scenario], runs: Sequence[MethodRun]) -> dict[str, Any]:
    """Return the charts, and the end of the time axis that they share."""
    charts = [chart for scenario in scenarios for chart in _charts(scenario, runs)]
    moments = [moment for chart in charts for series in chart["series"] for moment in series["seconds_at"]]
    return {"charts": charts, "seconds": max(moments, default=0.0)}


def _charts(scenario: Scenario, runs: Sequence[MethodRun]) -> Iterator[dict[str, Any]]:
    """Yield the chart of each state of a scenario in which a load began."""
    limit = "" if scenario.host_limit_bytes is None else f", {format_bytes(scenario.host_limit_bytes)}"
    shown = [run for run in typical_runs(scenario, runs) if run.outcome.trace is not None]
    for state in scenario.states:
        series = [_series(run) for run in shown if run.state == state]
        if series:
            yield {
                "label": f"{scenario.short_dtype}, {state}{limit}",
                "title": f"{scenario.title}, {state}",
                "finding": finding(scenario, state, runs),
                "final_bytes": scenario.final_bytes,
                "series": series,
            }


def _series(run: MethodRun) -> dict[str, Any]:
    trace = run.outcome.trace
    assert trace is not None
    return {
        "method": run.method,
        "status": run.outcome.status,
        "reason": run.outcome.reason,
        "seconds": round(run.outcome.seconds, 4),
        "seconds_at": [round(moment, 4) for moment in trace.seconds],
        "total": trace.total(),
        "anon": trace.anon,
        "file": trace.file,
        "device": trace.device,
    }
