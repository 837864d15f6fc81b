"""``python -m bench.convert``: time of ``sluice.convert`` compared with ``cp`` and ``sync`` of the same file, cold."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import track

import sluice
from sluice.benchmark import machine as _machine
from sluice.benchmark.cache import make_cold
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, make_checkpoint
from sluice.benchmark.results import show_document
from sluice.benchmark.table import console_for_tables

__all__ = ["CASES", "main"]

#: Reference of all ratios.
_COPY = "cp"

#: Speed to reach, as a fraction of the copy's speed.
_GOAL = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One conversion."""

    #: Suffix of the source.
    source: str
    #: Name of the destination.
    destination: str
    #: Dtype of the destination; None for that of the source.
    dtype: torch.dtype | None = None
    #: Largest size of a shard.
    shard: str | None = None


#: Every conversion by its name on the command line. The source is in fp32.
CASES = {
    "pth-pth": Case(source=".pth", destination="out.pth"),
    "pth-safetensors": Case(source=".pth", destination="out.safetensors"),
    "safetensors-pth": Case(source=".safetensors", destination="out.pth"),
    "safetensors-shards": Case(source=".safetensors", destination="out", shard="500MB"),
    "pth-safetensors-bf16": Case(source=".pth", destination="out.safetensors", dtype=torch.bfloat16),
}


def _copy(source: Path, destination: Path) -> None:
    subprocess.run(["cp", "--reflink=never", str(source), str(destination)], check=True)
    subprocess.run(["sync", str(destination)], check=True)


def _convert(case: Case, source: Path, folder: Path) -> None:
    sluice.convert(source, folder / case.destination, dtype=case.dtype, max_shard_size=case.shard)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _seconds(source: Path, made: Path, work: Callable[[], None]) -> float:
    """Return the time of the work with the source uncached and no dirty pages."""
    os.sync()
    if not make_cold(source):
        raise click.ClickException(f"{source} stays cached: its file system has no disk")
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    _remove(made)
    return seconds


def measure(
    cases: Mapping[str, Case], sources: Mapping[str, Path], runs: int, console: Console
) -> dict[str, list[float]]:
    """Return the seconds of each run of each case and of the copies of its source, interleaved."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for _ in track(range(runs), "rounds", console=console):
        for suffix in sorted({case.source for case in cases.values()}):
            source = sources[suffix]
            made = source.with_name("copy")
            seconds[f"{_COPY} {suffix}"].append(_seconds(source, made, partial(_copy, source, made)))
            for name, case in cases.items():
                if case.source == suffix:
                    made = source.with_name(case.destination)
                    seconds[name].append(_seconds(source, made, partial(_convert, case, source, source.parent)))
    return dict(seconds)


def table(cases: Mapping[str, Case], seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the lines of the table."""
    lines = ["| conversion | seconds | `cp` + `sync` | speed / `cp` | spread |", "|---|---:|---:|---:|---:|"]
    for name, case in cases.items():
        own, copy = (statistics.median(seconds[key]) for key in (name, f"{_COPY} {case.source}"))
        spread = f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f}"
        lines.append(f"| {name} | {own:.2f} | {copy:.2f} | {copy / own:.2f} | {spread} |")
    return lines


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="large", show_default=True, help="Size of the model.")
@click.option("--case", "names", type=click.Choice(list(CASES)), multiple=True, help="Only this one; repeatable.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Repetitions; tables show medians.")
@click.option("--directory", type=click.Path(path_type=Path), help="Keep the checkpoints here and use those there are.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
def main(size: str, names: tuple[str, ...], runs: int, directory: Path | None, out: Path) -> None:
    """Convert and copy a checkpoint alternately, uncached, each until the result is durable."""
    console = console_for_tables()
    cases = {name: CASES[name] for name in names or CASES}
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    with nullcontext(directory) if directory else temporary_folder() as folder:
        machine = _machine.describe(folder, ("torch", "sluice", "safetensors"))
        sources = {case.source: folder / f"{size}{case.source}" for case in cases.values()}
        for suffix, path in sources.items():
            if not path.exists():
                with console.status(f"making {path.name}"):
                    make_checkpoint(path, size, torch.float32, "torch" if suffix == ".pth" else "safetensors")
        nbytes = {path.name: path.stat().st_size for path in sources.values()}
        seconds = measure(cases, sources, runs, console)
    lines = table(cases, seconds)
    command = " ".join(["python -m bench.convert", f"--size {size}", f"--runs {runs}", *(f"--case {n}" for n in names)])
    document = {"command": command, "machine": machine, "source_bytes": nbytes, "seconds": seconds}
    show_document(console, out, "convert", document, lines, f"; goal: {_GOAL}")


if __name__ == "__main__":
    main()
