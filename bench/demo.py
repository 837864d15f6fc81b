"""``make demo``: the tutorial's loading methods and sluice, side by side on this machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import click
import torch
from rich.panel import Panel

from sluice._units import format_bytes
from sluice.benchmark import _machine
from sluice.benchmark._cache import make_cold
from sluice.benchmark._folder import temporary_folder
from sluice.benchmark._process import run_job
from sluice.benchmark._records import Job, Precision, Run, Scenario
from sluice.benchmark._runner import REFERENCE, run_with_progress
from sluice.benchmark._strategies import STRATEGIES
from sluice.benchmark._summary import summarise
from sluice.benchmark._table import console_for_tables, print_tables, write_results
from sluice.benchmark.gpt2 import SIZES, final_bytes, make_checkpoint

__all__ = ["choose_size", "main"]

#: Sizes to choose from: the tiny one only tries the benchmark itself.
_CHOICE = SIZES[1:]

#: The demo should be over in about two minutes; the estimate is rough and the table better the larger the model.
_BUDGET_SECONDS = 150.0

#: Processes of one round: six strategies in two precisions, cold and cached, and the two references.
_PROCESSES = 4 * len(STRATEGIES) + 2

#: How often all processes of a round together initialise, write and read the bytes of the checkpoint; measured.
_HANDLINGS = 21

#: The hungriest strategy holds 2 F (fp32), and the cached rows need the file in the page cache beside it.
_MEMORY_IN_FINALS = 3.2
_MEMORY_BESIDE_BYTES = 1 << 30

#: One checkpoint in one file, one in a file for every parameter.
_DISK_IN_FINALS = 2.1

#: Bytes of the probe file: long enough for a disk to reach its speed.
_PROBE_BYTES = 128 << 20


def choose_size(
    finals: Mapping[str, int],
    *,
    memory_bytes: int,
    disk_bytes: int,
    device_bytes: int | None,
    seconds_per_process: float,
    seconds_per_byte: float,
) -> str:
    """Return the largest size that memory, disk and patience allow; the smallest when none does.

    Args:
        finals: F of each size in fp32, the smallest first.
        memory_bytes: Free host memory.
        disk_bytes: Free disk space.
        device_bytes: Free memory of the accelerator; None without one.
        seconds_per_process: What a process costs beside its load, from a probe.
        seconds_per_byte: What initialising, writing and reading a byte takes, from a probe.
    """
    chosen = next(iter(finals))
    for size, final in finals.items():
        seconds = _PROCESSES * seconds_per_process + _HANDLINGS * seconds_per_byte * final
        fits = (
            _MEMORY_IN_FINALS * final + _MEMORY_BESIDE_BYTES <= memory_bytes
            and _DISK_IN_FINALS * final <= disk_bytes
            and (device_bytes is None or _DISK_IN_FINALS * final <= device_bytes)
        )
        if fits and seconds <= _BUDGET_SECONDS:
            chosen = size
    return chosen


def _probe_seconds_per_byte(directory: Path) -> float:
    """Return what it takes to initialise, write out and read back one byte in this directory."""
    begin = time.perf_counter()
    probe = directory / "probe"
    numbers = torch.empty(_PROBE_BYTES // 4).uniform_()
    numbers.numpy().tofile(probe)
    make_cold(probe)
    torch.from_file(str(probe), size=numbers.numel(), dtype=torch.float32).clone()
    probe.unlink()
    return (time.perf_counter() - begin) / _PROBE_BYTES


def _probe_seconds_per_process() -> float:
    """Return what a process takes that hardly loads anything: torch's import, a context and the digests."""
    begin = time.perf_counter()
    device = _machine.device()
    run_job(Job(method=REFERENCE, model="tiny", checkpoint="", dtype="float32", device=device, verify=True))
    return time.perf_counter() - begin


def _largest_size(directory: Path) -> str:
    return choose_size(
        {size: final_bytes(size, torch.float32) for size in _CHOICE},
        memory_bytes=_machine.free_memory_bytes(),
        disk_bytes=shutil.disk_usage(directory).free,
        device_bytes=torch.cuda.mem_get_info()[0] if _machine.device() == "cuda" else None,
        seconds_per_process=_probe_seconds_per_process(),
        seconds_per_byte=_probe_seconds_per_byte(directory),
    )


def _scenario(size: str, dtype: Precision, directory: Path) -> Scenario:
    finished = {"float32": "fp32, as it is in the file", "bfloat16": "bf16, cast while loading"}[dtype]
    return Scenario(
        title=f"GPT-2 {size}, fp32 checkpoint → {finished}",
        model=size,
        dtype=dtype,
        device=_machine.device(),
        states=("cold", "warm"),
        checkpoints={
            method.name: directory / ("model.pth" if ".pth" in method.reads else "parameters") for method in STRATEGIES
        },
        final_bytes=final_bytes(size, torch.bfloat16 if dtype == "bfloat16" else torch.float32),
    )


def _verdict(scenarios: list[Scenario], runs: list[Run]) -> str:
    """Return one sentence for each scenario: what sluice needed and what the others did."""
    sentences = []
    for scenario in scenarios:
        rows = [row for row in summarise(scenario, runs) if row.seconds and row.over_final is not None]
        ours = next((row for row in rows if row.method == "sluice"), None)
        others = [row.over_final or 0.0 for row in rows if row.method != "sluice"]
        if ours and others:
            sentences.append(
                f"{scenario.dtype}: sluice peaked at [bold]{ours.over_final:.2f} F[/], "
                f"the others at {min(others):.2f} to {max(others):.2f} F."
            )
    return "\n".join(sentences)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), envvar="SIZE", help="Size of the model; else the largest that fits.")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="Repetitions; tables show medians.")
@click.option(
    "--directory", type=click.Path(path_type=Path), help="Where to put the checkpoints; else the temp folder."
)
@click.option("--keep", is_flag=True, help="Keep the checkpoints.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("demo-out"), show_default=True, help="Results.")
def main(size: str | None, runs: int, directory: Path | None, keep: bool, out: Path) -> None:
    """Load one GPT-2 checkpoint in every way that the tutorial knows, and with sluice."""
    console = console_for_tables()
    with temporary_folder(directory, keep=keep) as folder:
        with console.status("looking at memory and disk"):
            size = size or _largest_size(folder)
        machine = _machine.describe(folder, ["torch", "sluice"])
        console.print(Panel.fit("\n".join(f"{key}: {value}" for key, value in machine.items()), title="this machine"))
        with console.status(f"making the checkpoint of GPT-2 {size}, {format_bytes(final_bytes(size, torch.float32))}"):
            make_checkpoint(folder / "model.pth", size, torch.float32, "torch")
            make_checkpoint(folder / "parameters", size, torch.float32, "per-parameter")
        scenarios = [_scenario(size, dtype, folder) for dtype in ("float32", "bfloat16")]
        done = run_with_progress(console, scenarios, repetitions=runs)
    if keep:
        console.print(f"the checkpoints are in {folder}", highlight=False, soft_wrap=True)
    print_tables(console, scenarios, done)
    console.print(_verdict(scenarios, done), highlight=False)
    command = f"make demo SIZE={size}" if runs == 1 else f"python -m bench.demo --size {size} --runs {runs}"
    write_results(out, "results", machine=machine, command=command, scenarios=scenarios, runs=done)
    console.print(f"written: {out}/results.md, {out}/results.json", highlight=False, soft_wrap=True)
    wrong = [row.method for scenario in scenarios for row in summarise(scenario, done) if row.right is False]
    if wrong:
        raise click.ClickException(f"wrong weights or logits: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
