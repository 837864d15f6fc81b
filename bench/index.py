"""``python -m bench.index``: time and memory to open checkpoints of many tensors, compared with torch and safetensors.

Each figure comes from a fresh process. Seconds are CPU time for work of a single thread, so that a busy machine changes
little, and wall time if threads or the start of a process count. The command fails if a goal is missed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.table import Table
from safetensors.torch import save_file

from sluice.benchmark.machine import temporary_folder
from sluice.benchmark.results import console_for_tables

__all__ = ["main"]

#: Opens a file in a fresh process; prints CPU and wall seconds, and the growth of peak memory in bytes.
_OPEN = """
import sys, time
import sluice

def peak():
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

index = sluice.open
with index(sys.argv[2]):  # imports the modules that it needs
    pass
before = peak()
wall, processor = time.perf_counter(), time.process_time()
checkpoint = index(sys.argv[1])
print([time.process_time() - processor, time.perf_counter() - wall, peak() - before])
"""

_TORCH = """
import sys, time, torch

start = time.process_time()
torch.load(sys.argv[1], map_location="meta", weights_only=True)
print([time.process_time() - start])
"""

_SAFETENSORS = """
import sys, time, torch
from safetensors import safe_open

start = time.process_time()
with safe_open(sys.argv[1], "pt") as opened:
    for name in opened.keys():
        part = opened.get_slice(name)
        part.get_shape(), part.get_dtype()
print([time.process_time() - start])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    #: Name of the case.
    what: str
    #: Seconds of sluice.
    ours: float
    #: Seconds of the library, or of the goal.
    theirs: float
    #: Description of ``theirs``.
    reference: str
    #: Largest permitted ratio of ``ours`` to ``theirs``.
    goal: float
    #: Growth of sluice's peak memory, in bytes per tensor; None if not measured.
    tensor_bytes: float | None = None

    @property
    def kept(self) -> bool:
        """Whether the goal was reached, and that of memory: 1 KiB per tensor."""
        return self.ours <= self.goal * self.theirs and (self.tensor_bytes or 0) <= 1024


def _run(code: str, *arguments: Path) -> list[float]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


def _medians(measure: Callable[[], Sequence[float]], runs: int) -> list[float]:
    return [statistics.median(column) for column in zip(*(measure() for _ in range(runs)), strict=True)]


def _files(folder: Path, tensors: int, shards: int) -> Mapping[str, Path]:
    names = (f"model.layers.{number // 10}.{number % 10}.weight" for number in range(tensors))
    values = {name: torch.ones(1 + number % 10) for number, name in enumerate(names)}
    paths = {name: folder / name for name in ("many.pth", "legacy.pth", "many.safetensors", "shards", "small.pth")}
    torch.save(values, paths["many.pth"])
    torch.save(values, paths["legacy.pth"], _use_new_zipfile_serialization=False)
    save_file(values, paths["many.safetensors"])
    torch.save({"w": torch.ones(1)}, paths["small.pth"])
    paths["shards"].mkdir()
    places = {}
    for number in range(shards):
        part = {f"layers.{number}.{which}": torch.ones(4) for which in range(20)}
        name = f"model-{number:05}.safetensors"
        save_file(part, paths["shards"] / name)
        places.update(dict.fromkeys(part, name))
    (paths["shards"] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return paths


def _rows(paths: Mapping[str, Path], tensors: int, shards: int, runs: int) -> list[Row]:
    small = paths["small.pth"]
    rows = []
    libraries = {
        "many.pth": ("torch.save, zip", _TORCH, "torch.load, meta", 1 / 3),
        "legacy.pth": ("torch.save, legacy", _TORCH, "torch.load, meta", 1 / 3),
        "many.safetensors": ("safetensors", _SAFETENSORS, "safetensors: names, shapes, dtypes", 1.5),
    }
    for file, (what, code, other, goal) in libraries.items():
        ours, _, grown = _medians(lambda file=file: _run(_OPEN, paths[file], small), runs)  # type: ignore[misc]
        (theirs,) = _medians(lambda file=file, code=code: _run(code, paths[file]), runs)  # type: ignore[misc]
        rows.append(Row(what=what, ours=ours, theirs=theirs, reference=other, goal=goal, tensor_bytes=grown / tensors))
    _, wall, _ = _medians(lambda: _run(_OPEN, paths["shards"], small), runs)
    rows.append(Row(what=f"{shards:,} shards (wall)", ours=wall, theirs=2.0, reference="2 s", goal=1.0))
    return rows


@click.command()
@click.option("--tensors", default=100_000, show_default=True, help="Tensors of a file.")
@click.option("--shards", default=1000, show_default=True, help="Files of a directory.")
@click.option("--runs", default=3, show_default=True, help="Fresh processes per figure; the table shows the median.")
def main(*, tensors: int, shards: int, runs: int) -> None:
    """Measure time and memory to open checkpoints of many tensors."""
    with temporary_folder() as folder:
        rows = _rows(_files(Path(folder), tensors, shards), tensors, shards, runs)
    table = Table("file", "sluice, s", "reference, s", "which is", "ratio", "goal", "bytes a tensor", "kept")
    for row in rows:
        grown = "-" if row.tensor_bytes is None else f"{row.tensor_bytes:.0f}"
        figures = (
            f"{row.ours:.2f}",
            f"{row.theirs:.2f}",
            row.reference,
            f"{row.ours / row.theirs:.2f}",
            f"{row.goal:.2f}",
        )
        table.add_row(row.what, *figures, grown, "yes" if row.kept else "no")
    console_for_tables().print(table)
    if not all(row.kept for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
