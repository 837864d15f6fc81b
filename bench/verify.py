"""``python -m bench.verify``: time of ``sluice.verify`` and ``sluice.diff``, compared with raw reads of the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import torch
from rich.progress import track

import sluice
from sluice.benchmark import machine as _machine
from sluice.benchmark.cache import make_cold, make_warm
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, make_checkpoint
from sluice.benchmark.raw import read_file
from sluice.benchmark.results import show_document
from sluice.benchmark.table import console_for_tables
from sluice.benchmark.writing import CheckpointFormat

__all__ = ["CASES", "main"]

_PTH, _SAFETENSORS = ".pth", ".safetensors"
_FORMATS: dict[str, CheckpointFormat] = {_PTH: "torch", _SAFETENSORS: "safetensors"}

#: Threads of the raw read, cold and warm.
_THREADS = {"cold": 8, "warm": os.cpu_count() or 1}


def _raw(paths: Sequence[Path], state: str) -> None:
    for path in paths:
        read_file(str(path), direct=state == "cold", threads=_THREADS[state])


def _verify(paths: Sequence[Path], _: str) -> None:
    assert sluice.verify(paths[0]).ok


def _hash(paths: Sequence[Path], _: str) -> None:
    assert sluice.verify(paths[0], hashes="sha256").ok


def _diff(paths: Sequence[Path], _: str) -> None:
    assert sluice.diff(paths[0], paths[1]).same


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A function that reads whole checkpoints."""

    #: Reads the files, cold or warm.
    run: Callable[[Sequence[Path], str], None]
    #: Suffixes of the files.
    files: tuple[str, ...]


#: Cases by their names in the table; the others are compared with the ``raw`` ones.
CASES = {
    "raw .pth": Case(run=_raw, files=(_PTH,)),
    "verify .pth: CRC-32": Case(run=_verify, files=(_PTH,)),
    "verify .pth: CRC-32 and sha256": Case(run=_hash, files=(_PTH,)),
    "raw .safetensors": Case(run=_raw, files=(_SAFETENSORS,)),
    "verify .safetensors: readable": Case(run=_verify, files=(_SAFETENSORS,)),
    "raw .pth and .safetensors": Case(run=_raw, files=(_PTH, _SAFETENSORS)),
    "diff .pth .safetensors": Case(run=_diff, files=(_PTH, _SAFETENSORS)),
}


def _raw_of(case: Case) -> str:
    return next(name for name, other in CASES.items() if other.run is _raw and other.files == case.files)


def _child(name: str, state: str, paths: Mapping[str, Path]) -> None:
    """Read once and print the seconds."""
    case = CASES[name]
    files = [paths[suffix] for suffix in case.files]
    for path in files:
        if not (make_cold if state == "cold" else make_warm)(path):
            raise click.ClickException(f"{path} cannot be made {state}")
    started = time.perf_counter()
    case.run(files, state)
    print(json.dumps(time.perf_counter() - started))


def _run(name: str, state: str, size: str, folder: Path) -> float:
    options = ["--child", name, "--state", state, "--size", size, "--directory", str(folder)]
    done = subprocess.run([sys.executable, "-m", "bench.verify", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{name} failed: {done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def table(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Return the lines of the table.

    Args:
        seconds: Of each run, by case and state.
    """
    states = list(next(iter(seconds.values())))
    headings = [f"{state} s | spread | speed / raw" for state in states]
    lines = [f"| what | {' | '.join(headings)} |", "|---|" + "---:|" * (3 * len(states))]
    for name, runs in seconds.items():
        cells = []
        for state in states:
            own, raw = median(runs[state]), median(seconds[_raw_of(CASES[name])][state])
            cells.append(f"{own:.2f} | {min(runs[state]):.2f} to {max(runs[state]):.2f} | {raw / own:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="large", show_default=True, help="Size of the model.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Repetitions; tables show medians.")
@click.option("--directory", type=click.Path(path_type=Path), help="Keep the checkpoints here and use those there are.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
@click.option("--child", hidden=True, type=click.Choice(list(CASES)))
@click.option(
    "--state", "states", type=click.Choice(["cold", "warm"]), multiple=True, help="Only this one.", show_default=True
)
def main(size: str, runs: int, directory: Path | None, out: Path, child: str | None, states: tuple[str, ...]) -> None:
    """Verify and compare checkpoints, and read them raw, interleaved, each in a fresh process."""
    if child is not None:
        assert directory is not None
        _child(child, states[0], {suffix: directory / f"{size}{suffix}" for suffix in _FORMATS})
        return
    console = console_for_tables()
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    seconds: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with nullcontext(directory) if directory else temporary_folder() as folder:
        machine = _machine.describe(folder, ("torch", "sluice", "safetensors"))
        for suffix, form in _FORMATS.items():
            if not (folder / f"{size}{suffix}").exists():
                with console.status(f"making {size}{suffix}"):
                    make_checkpoint(folder / f"{size}{suffix}", size, torch.float32, form)
        for _ in track(range(runs), "rounds", console=console):
            for state in states or ("cold", "warm"):
                for name in CASES:
                    seconds[name][state].append(_run(name, state, size, folder))
    lines = table(seconds)
    command = " ".join(
        ["python -m bench.verify", f"--size {size}", f"--runs {runs}", *(f"--state {s}" for s in states)]
    )
    show_document(console, out, "verify", {"command": command, "machine": machine, "seconds": seconds}, lines)


if __name__ == "__main__":
    main()
