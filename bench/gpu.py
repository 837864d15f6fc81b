"""``python3 -m bench.gpu``: the tutorial's methods, sluice and its peers on a CUDA device, with raw limits and goals.

The command is bounded in time: the most important runs come first, and runs that do not fit get a row with the reason.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from bench import _puzzle as puzzles
from bench._gpu_child import run_task
from bench._gpu_goals import Figures, judge
from bench._gpu_report import (
    Section,
    append,
    device_section,
    goals_section,
    limits_section,
    print_sections,
    puzzle_section,
)
from bench._gpu_runner import run_within
from bench._puzzle import Puzzle
from bench.timeline import Trace, Watcher, draw
from sluice._units import format_bytes
from sluice.benchmark import machine as _machine
from sluice.benchmark.cache import make_cold
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, final_bytes, make_checkpoint
from sluice.benchmark.records import MethodRun, Outcome, Precision, Scenario, State
from sluice.benchmark.results import write_results
from sluice.benchmark.runner import REFERENCE
from sluice.benchmark.strategies import STRATEGIES
from sluice.benchmark.summary import raw_seconds, summarise
from sluice.benchmark.table import console_for_tables, print_tables

__all__ = ["main", "scenarios_for"]

_DEVICE = "cuda"

_PACKAGES = ("torch", "sluice", "safetensors", "runai-model-streamer", "fastsafetensors", "instanttensor", "matplotlib")

_RAW = ("raw-direct", "raw-buffered")
_SAFETENSORS_PEERS = ("safetensors-load-model", "fastsafetensors", "runai-streamer", "instanttensor")
_OURS = "sluice-load-into"

_PUZZLE_TITLE = "the puzzle, bf16"

#: Fraction of the time reserved for the puzzle, which runs last because it needs the disk.
_SHARE_OF_PUZZLE = 0.35

#: Seconds reserved for tables and the picture.
_LAST_SECONDS = 10.0

#: Needed disk space in files: three checkpoints of the same weights, and a margin.
_DISK_IN_FILES = 3.1

#: Number of matrices of the puzzle, 256 MiB each, that are generated at once.
_PUZZLE_THREADS = 8


@dataclass(slots=True)
class Results:
    """Results so far."""

    #: Every run of every scenario.
    runs: list[MethodRun] = field(default_factory=list)
    #: Memory over time of each load.
    traces: list[Trace] = field(default_factory=list)
    #: Largest growth of the device's memory, by title of the scenario and method.
    device_growth_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Result of the copy from page-locked memory.
    pinned: dict[str, Any] = field(default_factory=dict)
    #: Size of the puzzle; None if it was not tried.
    puzzle: Puzzle | None = None
    #: Result of the puzzle, or ``reason``.
    solved: dict[str, Any] = field(default_factory=dict)


def scenarios_for(size: str, directory: Path) -> list[Scenario]:
    """Return the scenarios of GPT-2 in this size, most important first."""
    pth, safetensors, folder = directory / "model.pth", directory / "model.safetensors", directory / "parameters"
    tutorial = {method.name: pth if ".pth" in method.reads else folder for method in STRATEGIES}
    torchs_and_ours = dict.fromkeys(("torch-load", "torch-mmap", _OURS), pth)
    peers = dict.fromkeys((*_SAFETENSORS_PEERS, _OURS), safetensors)
    return [
        _scenario(".pth, fp32", size, "float32", {**dict.fromkeys(_RAW, pth), **torchs_and_ours}),
        _scenario("the tutorial's methods, fp32", size, "float32", tutorial),
        _scenario(".pth, fp32 → bf16", size, "bfloat16", torchs_and_ours),
        _scenario(".safetensors, fp32", size, "float32", peers),
        _scenario(".safetensors, fp32 → bf16", size, "bfloat16", peers),
    ]


def _scenario(title: str, size: str, dtype: Precision, checkpoints: dict[str, Path]) -> Scenario:
    return Scenario(
        title=f"GPT-2 {size}, {title}",
        model=size,
        dtype=dtype,
        device=_DEVICE,
        states=("cold", "warm"),
        checkpoints=checkpoints,
        final_bytes=final_bytes(size, torch.bfloat16 if dtype == "bfloat16" else torch.float32),
    )


def _device_used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def _make_checkpoints(console: Console, size: str, folder: Path) -> float:
    """Write the three checkpoints; return the speed of generating and writing the first, in bytes per second."""
    nbytes = final_bytes(size, torch.float32)
    if shutil.disk_usage(folder).free < _DISK_IN_FILES * nbytes:
        raise click.ClickException(
            f"three checkpoints of GPT-2 {size} take {format_bytes(int(_DISK_IN_FILES * nbytes))} of disk: "
            "choose a smaller --size or another --directory"
        )
    with console.status("making the checkpoints"):
        begin = time.perf_counter()
        make_checkpoint(folder / "model.pth", size, torch.float32, "torch")
        make_cold(folder / "model.pth")
        seconds = time.perf_counter() - begin
        make_checkpoint(folder / "model.safetensors", size, torch.float32, "safetensors")
        make_checkpoint(folder / "parameters", size, torch.float32, "per-parameter")
    return nbytes / seconds


def _trace_title(scenario: str, method: str, state: State) -> str:
    return f"{scenario}: {method}, {state}"


def _run_all(console: Console, scenarios: Sequence[Scenario], results: Results, *, deadline: float) -> None:
    """Run the scenarios, print a line per load, and store the traces of the device."""

    def watch(scenario: Scenario, method: str, state: State, load: Callable[[], Outcome]) -> Outcome:
        watcher = Watcher(_device_used)
        try:
            outcome = load()
        finally:
            trace = watcher.stop(_trace_title(scenario.title, method, state), scenario.final_bytes)
        if outcome.status == "ok" and method not in _RAW:
            results.traces.append(trace)
            grown = results.device_growth_bytes.setdefault(scenario.title, {})
            grown[method] = max(grown.get(method, 0), trace.device_growth_bytes)
        return outcome

    total = sum(len(scenario.states) * len(scenario.checkpoints) for scenario in scenarios)
    loads = 0
    for run in run_within(scenarios, deadline=deadline, watch=watch):
        results.runs.append(run)
        found = f"{run.outcome.seconds:.2f} s" if run.outcome.status == "ok" else run.outcome.status
        if run.method != REFERENCE:
            loads += 1
            title = _trace_title(run.scenario, run.method, run.state)
            console.print(f"{loads:>4}/{total}  {title}: {found}", highlight=False, soft_wrap=True)
        elif run.outcome.status != "ok":
            console.print(f"no reference to compare with: {run.outcome.reason}", style="red", highlight=False)


def _solve_puzzle(
    console: Console, folder: Path, results: Results, *, deadline: float, bytes_per_second: float
) -> None:
    """Write the largest puzzle that fits disk, device and time, and load it."""
    left = deadline - time.monotonic()
    size = puzzles.choose(
        disk_bytes=shutil.disk_usage(folder).free,
        device_bytes=torch.cuda.mem_get_info()[0],
        seconds=left,
        bytes_per_second=bytes_per_second,
    )
    results.puzzle = size
    if size is None:
        results.solved = {"reason": f"not tried: disk, device or the {left:.0f} s left allow too little of it"}
        return
    path = folder / "puzzle.pth"
    with console.status(f"making the puzzle, {format_bytes(size.file_bytes)}"):
        puzzles.make_file(path, size, threads=min(_PUZZLE_THREADS, len(os.sched_getaffinity(0))))
        if not make_cold(path):
            results.solved = {"reason": "the file could not be dropped from the page cache"}
            return
    task = {"task": "puzzle", "path": str(path), "layers": size.layers, "width": size.width, "device": _DEVICE}
    watcher = Watcher(_device_used)
    try:
        results.solved = run_task(task, timeout_seconds=deadline - time.monotonic())
    finally:
        results.traces.append(watcher.stop(_PUZZLE_TITLE, size.final_bytes))


def _figures(scenarios: Sequence[Scenario], results: Results) -> list[Figures]:
    return [
        Figures(
            title=scenario.title,
            final_bytes=scenario.final_bytes,
            rows=summarise(scenario, results.runs),
            device_growth_bytes=results.device_growth_bytes.get(scenario.title, {}),
        )
        for scenario in scenarios
    ]


def _panels(scenarios: Sequence[Scenario], traces: Sequence[Trace]) -> list[Trace]:
    """Return the panels of the picture: the tutorial's methods from the page cache, and the puzzle."""
    tutorial = next(scenario for scenario in scenarios if "sluice" in scenario.checkpoints)
    titles = {
        _trace_title(tutorial.title, method, "warm"): f"{method}, {tutorial.model}" for method in tutorial.checkpoints
    }
    titles[_PUZZLE_TITLE] = _PUZZLE_TITLE
    return [replace(trace, title=titles[trace.title]) for trace in traces if trace.title in titles]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="xl", show_default=True, help="Size of GPT-2.")
@click.option(
    "--device",
    type=click.Choice(["cuda", "sim"]),
    default="cuda",
    show_default=True,
    help="sim: the simulated device of the tests; memory only, without a time limit and files.",
)
@click.option("--minutes", type=click.FloatRange(min=1), default=7.5, show_default=True, help="When to end.")
@click.option(
    "--directory", type=click.Path(path_type=Path), help="Where to put the checkpoints; else the temp folder."
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("gpu-out"), show_default=True, help="Results.")
def main(size: str, device: str, minutes: float, directory: Path | None, out: Path) -> None:
    """Compare loaders on a CUDA device: memory of device and host, seconds cold and cached, and goals."""
    if device == "sim":
        from bench import simulated

        simulated.run(console_for_tables(), [size], directory)
        return
    if not torch.cuda.is_available():
        click.echo(f"bench.gpu needs a CUDA device, and torch {torch.__version__} finds none here.", err=True)
        raise SystemExit(2)
    end = time.monotonic() + minutes * 60 - _LAST_SECONDS
    console = console_for_tables()
    results = Results()
    nbytes = final_bytes(size, torch.float32)
    with temporary_folder(directory) as folder:
        machine = _machine.describe(folder, _PACKAGES)
        console.print("\n".join(f"{key}: {value}" for key, value in machine.items()), highlight=False)
        bytes_per_second = _make_checkpoints(console, size, folder)
        results.pinned = run_task({"task": "pinned-copy", "bytes": nbytes}, timeout_seconds=end - time.monotonic())
        scenarios = scenarios_for(size, folder)
        _run_all(console, scenarios, results, deadline=end - _SHARE_OF_PUZZLE * minutes * 60)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _solve_puzzle(console, folder, results, deadline=end, bytes_per_second=bytes_per_second)
    command = f"python3 -m bench.gpu --size {size} --minutes {minutes:g}"
    sections = _sections(scenarios, results)
    print_tables(console, scenarios, results.runs)
    print_sections(console, sections)
    write_results(out, "gpu", machine=machine, command=command, scenarios=scenarios, runs=results.runs)
    no_picture = draw(out / "gpu.png", _panels(scenarios, results.traces))
    append(out, "gpu", sections, notes=[no_picture or "![memory over time](gpu.png)"])
    console.print(f"written: {out}/gpu.md, {out}/gpu.json, {no_picture or f'{out}/gpu.png'}", soft_wrap=True)
    wrong = [row.method for scenario in scenarios for row in summarise(scenario, results.runs) if row.right is False]
    if wrong:
        raise click.ClickException(f"wrong weights or logits: {', '.join(wrong)}")


def _sections(scenarios: Sequence[Scenario], results: Results) -> list[Section]:
    """Return the tables other than those of the scenarios."""
    of_pth = [run for run in results.runs if run.scenario == scenarios[0].title]
    size = results.puzzle
    goals = judge(
        _figures(scenarios, results),
        pinned_copy_seconds=results.pinned.get("seconds"),
        raw_read_seconds=raw_seconds(of_pth, "cold"),
        puzzle={**results.solved, "final_bytes": size.final_bytes} if size else None,
    )
    return [
        limits_section(final_bytes(scenarios[0].model, torch.float32), results.pinned, of_pth),
        device_section(results.traces),
        puzzle_section(size, results.solved),
        goals_section(goals),
    ]


if __name__ == "__main__":
    main()
