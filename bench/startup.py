"""``python -m bench.startup``: the first load in a process and ``sluice inspect``, next to the import of torch.

Each figure comes from a fresh process, whose references are measured in the same process or right before it. The load
is of a small file into a module of eight tensors, after ``import torch``. The command fails if a goal is missed.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click
import torch
from rich.table import Table
from safetensors.torch import save_file

from sluice.benchmark.machine import temporary_folder
from sluice.benchmark.results import console_for_tables

__all__ = ["main"]

#: Prints the processor seconds of importing torch, of importing sluice, and of its first use.
_FIRST_USE = """
import json, sys, time
start = time.process_time()
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
after_torch = time.process_time()
import sluice
imported = time.process_time()
{use}
print(json.dumps([after_torch - start, imported - after_torch, time.process_time() - imported]))
"""

_USES = {
    "load_into, .pth": "sluice.load_into(model, sys.argv[1])",
    "load_into, .safetensors": "sluice.load_into(model, sys.argv[2])",
    "load_state_dict, .pth": "sluice.load_state_dict(sys.argv[1])",
    "empty_init": "with sluice.empty_init(): torch.nn.Linear(64, 64)",
}

#: Largest share of ``import torch`` that a first use may take, and that ``sluice inspect`` may take.
_USE_GOAL, _INSPECT_GOAL = 0.06, 0.10

#: Largest processor time of ``import sluice``, in seconds.
_IMPORT_GOAL = 0.010


def _first_use(use: str, files: tuple[Path, Path]) -> list[float]:
    command = [sys.executable, "-c", _FIRST_USE.format(use=use), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def _command(*arguments: str) -> tuple[float, float]:
    """Return processor and wall seconds of a fresh Python."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True, env=_environment())
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def _environment() -> Mapping[str, str]:
    """Return the environment with cached bytecode, as an installed package has it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _rows(files: tuple[Path, Path], runs: int) -> list[tuple[str, float, float, float]]:
    """Return what was measured, its seconds, those of the reference, and the largest permitted ratio."""
    rows = []
    imports: list[float] = []
    for what, use in _USES.items():
        _first_use(use, files)  # writes the bytecode
        torch_seconds, import_seconds, use_seconds = zip(*(_first_use(use, files) for _ in range(runs)), strict=True)
        imports += import_seconds
        ours = [first + second for first, second in zip(import_seconds, use_seconds, strict=True)]
        rows.append((f"import, {what}", statistics.median(ours), statistics.median(torch_seconds), _USE_GOAL))
    rows.append(("import sluice, against 10 ms", statistics.median(imports), _IMPORT_GOAL, 1.0))
    pairs = [
        (_command("-m", "sluice", "inspect", str(files[0])), _command("-c", "import torch")) for _ in range(runs + 1)
    ][1:]
    for position, clock in enumerate(("processor", "wall")):
        ours = [inspect[position] for inspect, _ in pairs]
        theirs = [reference[position] for _, reference in pairs]
        rows.append((f"sluice inspect, {clock}", statistics.median(ours), statistics.median(theirs), _INSPECT_GOAL))
    return rows


@click.command()
@click.option("--runs", default=5, show_default=True, help="Fresh processes per figure; the table shows the median.")
def main(*, runs: int) -> None:
    """Measure the first load in a process, and `sluice inspect`, next to the import of torch."""
    weights = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).state_dict()
    with temporary_folder() as folder:
        files = (Path(folder) / "small.pth", Path(folder) / "small.safetensors")
        torch.save(weights, files[0])
        save_file(weights, files[1])
        rows = _rows(files, runs)
    table = Table("what", "sluice, ms", "reference, ms", "ratio", "goal", "kept")
    for what, ours, theirs, goal in rows:
        kept = "yes" if ours <= goal * theirs else "no"
        table.add_row(what, f"{ours * 1e3:.1f}", f"{theirs * 1e3:.0f}", f"{ours / theirs:.3f}", f"{goal:.2f}", kept)
    console_for_tables().print(table)
    if any(ours > goal * theirs for _, ours, theirs, goal in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
