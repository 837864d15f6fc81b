"""Lines that ``sluice bench`` prints around its tables: the machine, the chosen size, the findings and the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from sluice.benchmark.headline import explain_final_bytes, findings
from sluice.benchmark.records import SHORT_DTYPES, MethodRun, Scenario
from sluice.benchmark.sizes import Choice

__all__ = ["print_choice", "print_end", "print_machine"]


def print_machine(console: Console, machine: Mapping[str, str]) -> None:
    """Print the description of the machine."""
    lines = "\n".join(f"{key}: {value}" for key, value in machine.items())
    console.print(Panel.fit(Text(lines), title="this machine"))


def print_choice(console: Console, choice: Choice) -> None:
    """Print the chosen size, states and dtypes, with the reason."""
    dtypes = " and ".join(SHORT_DTYPES[dtype] for dtype in choice.dtypes)
    text = (
        f"GPT-2 {choice.size}, {dtypes}, {' and '.join(choice.states)}: about {choice.seconds:.0f} s; {choice.reason}"
    )
    console.print(text, highlight=False, soft_wrap=True)


def print_end(
    console: Console, scenarios: Sequence[Scenario], runs: Sequence[MethodRun], out: Path, kept: Path | None
) -> None:
    """Print the findings and the written files.

    Args:
        console: Where to print.
        scenarios: The scenarios.
        runs: Their runs.
        out: Directory of the results.
        kept: Directory of the generated checkpoints; None if they were deleted.
    """
    lines = [explain_final_bytes(scenarios), *findings(scenarios, runs), ""]
    if kept is not None:
        lines.append(f"checkpoints: {kept}")
    lines += [f"results: {out / 'results.md'}, {out / 'results.json'}", f"report: {(out / 'report.html').absolute()}"]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
