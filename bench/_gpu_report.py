"""Additional tables of ``bench.gpu``: for the terminal, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench._gpu_goals import Goal
from bench._puzzle import Puzzle
from bench.timeline import Trace
from sluice._units import format_bytes
from sluice.benchmark.records import MethodRun

__all__ = ["Section", "append", "device_section", "goals_section", "limits_section", "print_sections", "puzzle_section"]

_STYLES = {"reached": "green", "missed": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A small table."""

    #: Its heading.
    title: str
    #: The headings of its columns.
    headings: tuple[str, ...]
    #: Its cells; the first cell of each row is its name.
    rows: tuple[tuple[str, ...], ...]
    #: Sentences below it.
    notes: tuple[str, ...] = ()


def limits_section(file_bytes: int, pinned: Mapping[str, Any], runs: Sequence[MethodRun]) -> Section:
    """Return the raw limits of the machine for the bytes of the file."""
    rows = [_limit("copy from page-locked memory", file_bytes, pinned.get("seconds"), pinned.get("reason", ""))]
    for run in runs:
        if run.method.startswith("raw-"):
            good = run.outcome.status == "ok"
            seconds = run.outcome.seconds if good else None
            rows.append(_limit(f"{run.method}, {run.state}", file_bytes, seconds, run.outcome.reason))
    return Section(
        title=f"Raw limits: the {format_bytes(file_bytes)} of the fp32 file",
        headings=("what", "seconds", "GB/s"),
        rows=tuple(rows),
    )


def _limit(name: str, nbytes: int, seconds: float | None, reason: str) -> tuple[str, ...]:
    if not seconds:
        return (name, reason or "not measured", "-")
    return (name, f"{seconds:.3f}", f"{nbytes / seconds / 1e9:.2f}")


def device_section(traces: Sequence[Trace]) -> Section:
    """Return the growth of the whole device's memory, which includes allocators other than torch's."""
    return Section(
        title="Growth of the whole device's memory, the process's CUDA context included",
        headings=("load", "peak", "over F"),
        rows=tuple(
            (
                trace.title,
                format_bytes(trace.device_growth_bytes),
                f"{trace.device_growth_bytes / trace.final_bytes:.2f}",
            )
            for trace in traces
        ),
        notes=("sampled every 10 ms: shorter peaks can be missed",),
    )


def puzzle_section(puzzle: Puzzle | None, found: Mapping[str, Any]) -> Section:
    """Return the result of the puzzle; ``found`` has a ``reason`` if it was not solved."""
    size = (
        ()
        if puzzle is None
        else (
            ("scale", f"{puzzle.share:.2f} of the full puzzle"),
            ("file, fp32", format_bytes(puzzle.file_bytes)),
            ("model, bf16 (F)", format_bytes(puzzle.final_bytes)),
            ("cap of the device", format_bytes(puzzle.device_limit_bytes)),
        )
    )
    if "seconds" not in found:
        rows = (*size, ("result", str(found.get("reason", "not tried"))))
    else:
        rows = (
            *size,
            ("reserved on the device", format_bytes(found["device_reserved_bytes"])),
            ("allocated on the device", format_bytes(found["device_allocated_bytes"])),
            ("growth of the host", format_bytes(found["host_growth_bytes"])),
            ("seconds, cold", f"{found['seconds']:.1f}"),
            ("GB/s", f"{found['read_bytes'] / found['seconds'] / 1e9:.2f}"),
            ("wrong matrices", str(found["wrong_matrices"])),
            ("computes", "yes" if found["computes"] else "NO"),
        )
    return Section(title="The puzzle of pytorch issue 75242", headings=("what", "figure"), rows=rows)


def goals_section(goals: Sequence[Goal]) -> Section:
    """Return a table of goals and figures."""
    words = {True: "reached", False: "missed", None: "not measured"}
    return Section(
        title="Goals",
        headings=("goal", "bound", "measured", "verdict"),
        rows=tuple((goal.name, goal.bound, goal.found, words[goal.reached]) for goal in goals),
    )


def print_sections(console: Console, sections: Sequence[Section]) -> None:
    """Print a table per section."""
    for section in sections:
        table = Table(title=section.title, title_style="bold", title_justify="left", box=ROUNDED, header_style="bold")
        for position, heading in enumerate(section.headings):
            table.add_column(heading, justify="left" if position == 0 else "right")
        for row in section.rows:
            table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
        console.print(table)
        for note in section.notes:
            console.print(Text(f"  {note}", style="dim"))
        console.print()


def append(directory: Path, name: str, sections: Sequence[Section], *, notes: Sequence[str] = ()) -> None:
    """Append sections to the ``NAME.md`` and ``NAME.json`` that ``write_results`` wrote.

    Args:
        directory: Directory of both files.
        name: Stem of both files.
        sections: Sections to append.
        notes: Sentences at the end.
    """
    lines: list[str] = []
    for section in sections:
        lines += [f"### {section.title}", "", f"| {' | '.join(section.headings)} |"]
        lines += ["|---|" + "---:|" * (len(section.headings) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in section.rows]
        lines += ["", *(f"- {note}" for note in section.notes), ""]
    markdown = directory / f"{name}.md"
    text = "\n".join([markdown.read_text(encoding="utf-8"), *lines, *(f"- {note}" for note in notes), ""])
    markdown.write_text(text, encoding="utf-8")
    document = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    document["sections"] = [
        {"title": section.title, "rows": [dict(zip(section.headings, row, strict=True)) for row in section.rows]}
        for section in sections
    ]
    document["notes"] = list(notes)
    (directory / f"{name}.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
