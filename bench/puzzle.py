"""``python -m bench.puzzle --scale 0.1``: the puzzle of pytorch issue 75242, loaded with every method.

An fp32 checkpoint of twice the size of the half-precision model, on a machine whose memory holds the model but not the
checkpoint as well: 24 GB of device memory, 32 GB of host memory, a 40 GB file at full scale. Every method runs twice:
without a limit, to measure its memory, and in a memory control group of the host's size, to test whether it survives.
The interpreter with torch does not scale: below a scale of about 0.05 it leaves no memory for the model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from bench._gpu_report import Section, append, print_sections
from bench._puzzle import FULL, Puzzle, make_file
from sluice._options import MemoryLimits
from sluice._units import format_bytes, parse_bytes
from sluice.benchmark import machine as _machine
from sluice.benchmark.comparison import Checkpoints, ComparedModel, scenario
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.records import PTH, MethodRun, Scenario
from sluice.benchmark.report import write_report
from sluice.benchmark.results import write_results
from sluice.benchmark.runner import run_with_progress
from sluice.benchmark.strategies import STRATEGIES
from sluice.benchmark.summary import Row, summarise
from sluice.benchmark.table import console_for_tables, print_tables
from sluice.measuring import memory_limit_refusal

__all__ = ["goal_bytes", "main", "outcome_section"]

_PACKAGES = ("torch", "sluice", "accelerate")

#: The tutorial's methods and accelerate, the only peer that reads such a file.
_METHODS = (*(method.name for method in STRATEGIES if method.name != "sluice"), "accelerate", "sluice")

#: Permitted memory of sluice in addition to the finished model and staging, in bytes.
_EXTRA_BYTES = 64 << 20

#: Needed disk space in files: one file, the same as a file per parameter, and a margin.
_DISK_IN_FILES = 2.1


def goal_bytes(final_bytes: int) -> int:
    """Return the permitted growth of sluice in bytes: F + staging + 64 MiB."""
    return final_bytes + parse_bytes(MemoryLimits().staging) + _EXTRA_BYTES


def outcome_section(size: Puzzle, free: Scenario, limited: Scenario | None, runs: Sequence[MethodRun]) -> Section:
    """Return one table of both runs: the memory of each method, and its outcome under the limit."""
    needed = {row.method: row for row in summarise(free, runs)}
    survived = {row.method: row for row in summarise(limited, runs)} if limited else {}
    rows = [(method, *_needs(row), _fate(survived.get(method))) for method, row in needed.items()]
    limit = f"{size.host_limit_bytes / 1e9:.1f} GB of host memory"
    if free.device_limit_bytes is not None:
        limit += f" and {format_bytes(free.device_limit_bytes)} of the device"
    return Section(
        title=f"The puzzle of pytorch issue 75242 at scale {size.share:.2f}",
        headings=("method", "host, peak", "peak / F", "seconds, cold", f"under {limit}"),
        rows=tuple(rows),
        notes=(
            f"fp32 checkpoint of {size.file_bytes / 1e9:.2f} GB, F = {size.final_bytes / 1e9:.2f} GB in bf16 on the "
            + ("device" if free.device == "cuda" else "CPU: there is no CUDA device, so its limit was not tried"),
        ),
    )


def _needs(row: Row) -> tuple[str, str, str]:
    if "cold" not in row.seconds:
        return (row.failures["cold"], "-", "-")
    return (format_bytes(row.total_bytes), f"{row.over_final or 0:.2f}", f"{row.seconds['cold']:.2f}")


def _fate(row: Row | None) -> str:
    if row is None:
        return "not tried"
    if "cold" in row.seconds:
        return f"survives, {row.seconds['cold']:.2f} s"
    return f"{row.failures['cold']} at {format_bytes(row.total_bytes)}"


def _scenarios(size: Puzzle, path: Path, folder: Path, device: str, *, limited: bool) -> list[Scenario]:
    subject = ComparedModel(
        model="bench._puzzle:build",
        model_args=json.dumps({"layers": size.layers, "width": size.width}),
        title=f"{size.file_bytes / 1e9:.1f} GB in fp32",
        original=path,
        kind=PTH,
    )
    device_limit = size.device_limit_bytes if device == "cuda" else None
    checkpoints = Checkpoints(subject, folder)
    limits = [None, size.host_limit_bytes] if limited else [None]
    return [
        scenario(
            subject, checkpoints, _METHODS, "bfloat16", device=device, states=("cold",), host_limit_bytes=limit,
            device_limit_bytes=device_limit,
        )
        for limit in limits
    ]  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--scale", type=click.FloatRange(1 / FULL.layers, 1), default=0.1, show_default=True, help="Share of the puzzle."
)
@click.option("--directory", type=click.Path(path_type=Path), help="Where to put the file; else the temp folder.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("puzzle-out"), show_default=True, help="Results.")
def main(scale: float, directory: Path | None, out: Path) -> None:
    """Load a checkpoint of twice the model's size under a memory limit that it exceeds."""
    console = console_for_tables()
    size = Puzzle(layers=round(scale * FULL.layers))
    device = _machine.device()
    refusal = memory_limit_refusal()
    with temporary_folder(directory) as folder:
        if shutil.disk_usage(folder).free < _DISK_IN_FILES * size.file_bytes:
            raise click.ClickException(f"it takes {format_bytes(_DISK_IN_FILES * size.file_bytes)} of disk")
        machine = _machine.describe(folder, _PACKAGES)
        path = folder / "puzzle.pth"
        with console.status(f"making the file, {format_bytes(size.file_bytes)}"):
            make_file(path, size, threads=len(os.sched_getaffinity(0)))
            scenarios = _scenarios(size, path, folder, device, limited=refusal is None)
        runs = run_with_progress(console, scenarios, repetitions=1)
    command = f"python -m bench.puzzle --scale {scale:g}"
    _write(out, size, scenarios, runs, machine=machine, command=command)
    print_tables(console, scenarios, runs)
    print_sections(console, [outcome_section(size, scenarios[0], _limited(scenarios), runs)])
    if refusal:
        console.print(f"no limit was tried: {refusal}", highlight=False, markup=False)
    console.print(f"written: {out}/puzzle.md, {out}/puzzle.json, {out}/report.html", highlight=False, soft_wrap=True)
    _judge(console, scenarios, runs)


def _limited(scenarios: Sequence[Scenario]) -> Scenario | None:
    return next((each for each in scenarios if each.host_limit_bytes is not None), None)


def _write(
    out: Path,
    size: Puzzle,
    scenarios: Sequence[Scenario],
    runs: Sequence[MethodRun],
    *,
    machine: dict[str, str],
    command: str,
) -> None:
    write_results(out, "puzzle", machine=machine, command=command, scenarios=scenarios, runs=runs)
    append(out, "puzzle", [outcome_section(size, scenarios[0], _limited(scenarios), runs)])
    title = f"The puzzle of pytorch issue 75242 at scale {size.share:.2f}"
    write_report(out / "report.html", title=title, machine=machine, command=command, scenarios=scenarios, runs=runs)


def _judge(console: Console, scenarios: Sequence[Scenario], runs: Sequence[MethodRun]) -> None:
    """Print whether sluice kept its bound in every run; fail if it did not."""
    for each in scenarios:
        (row,) = (row for row in summarise(each, runs) if row.method == "sluice")
        if "cold" not in row.seconds or row.right is not True:
            raise click.ClickException(f"sluice did not load it: {'; '.join(row.reasons) or 'wrong weights'}")
        on_host = each.final_bytes if each.device == "cpu" else 0
        found, allowed = row.total_bytes, goal_bytes(on_host)
        text = f"sluice grew by {format_bytes(found)}; F + staging + 64 MiB is {format_bytes(allowed)}"
        if found > allowed:
            raise click.ClickException(text)
        console.print(text, highlight=False)


if __name__ == "__main__":
    main()
