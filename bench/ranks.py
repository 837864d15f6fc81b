"""``python -m bench.ranks``: loads of one model by the ranks of one host, each way in new processes.

GPT-2 is divided by ``fully_shard`` over gloo on the CPU. Files are dropped from the page cache before a cold load. The
clock starts after imports, the process group and the model; memory is the growth of each process from there, as the
kernel records it (``VmHWM``), and ends when every weight was touched. Every way must finish with the same values.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench._rank_child import Job, Loaded, empty_model, work
from bench._rank_methods import DCP, FILE, METHODS, SHARDS
from sluice.benchmark import machine as _machine
from sluice.benchmark.cache import make_cold, make_warm
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import random_weight
from sluice.benchmark.results import show_document
from sluice.benchmark.table import console_for_tables
from sluice.benchmark.writing import write_checkpoint

__all__ = ["Cell", "main", "table"]

_TIMEOUT_SECONDS = 300
_SHARD_COUNT = 8
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load by all ranks."""

    method: str
    file: str
    ranks: int
    dtype: str
    cold: bool
    #: Seconds of each run, until the slowest rank was ready.
    seconds: tuple[float, ...] = ()
    #: Growth of each rank, in bytes; of the run in which the host grew most.
    growth: tuple[int, ...] = ()
    #: Bytes of the weights that each rank holds.
    held: tuple[int, ...] = ()
    #: Bytes that all ranks fetched from disks.
    fetched: int = 0
    #: Why there is no result.
    problem: str = ""


def _write(folder: Path, size: str) -> dict[str, Path]:
    """Write the checkpoints in fp32, and return the path of each kind."""
    shapes = {name: tensor.shape for name, tensor in empty_model(size).state_dict().items()}
    state = {name: random_weight(name, shape) for name, shape in shapes.items()}
    paths = {FILE: folder / "model.pth", SHARDS: folder / "shards", DCP: folder / "dcp"}
    write_checkpoint(state, paths[FILE], "torch")
    write_checkpoint(state, paths[DCP], "dcp")
    paths[SHARDS].mkdir()
    names = list(state)
    weight_map: dict[str, str] = {}
    for number in range(_SHARD_COUNT):
        file = f"model-{number + 1:05}-of-{_SHARD_COUNT:05}.safetensors"
        part = names[number * len(names) // _SHARD_COUNT : (number + 1) * len(names) // _SHARD_COUNT]
        write_checkpoint({name: state[name] for name in part}, paths[SHARDS] / file, "safetensors")
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (paths[SHARDS] / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    os.sync()
    return paths


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]


def _run(method: str, path: Path, size: str, dtype: str, ranks: int) -> list[Loaded]:
    """Load once, and return what each rank found."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["bench._rank_child", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "sluice.api.load"]
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        started = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            job = Job(method=method, path=path, size=size, dtype=dtype, rank=rank, ranks=ranks, store=f"{folder}/store")
            process = context.Process(target=work, args=(job, theirs))
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            theirs.close()
            started.append((process, ours))
        found = [_answer(pipe) for _, pipe in started]
        if not any(each.problem for each in found):
            for process, _ in started:
                process.join(20)
        return found


def _answer(pipe: Connection) -> Loaded:
    try:
        if not pipe.poll(_TIMEOUT_SECONDS):
            return Loaded(problem=f"not finished after {_TIMEOUT_SECONDS} s")
        answer: Loaded = pipe.recv()
        return answer
    except EOFError:
        return Loaded(problem="killed")


def _cell(
    method: str, kind: str, path: Path, size: str, dtype: str, world: int, runs: int, *, cold: bool
) -> tuple[Cell, float | None]:
    """Load several times; return the figures and the sum of the weights."""
    cell = Cell(method=method, file=kind, ranks=world, dtype=dtype, cold=cold)
    seconds: list[float] = []
    growth: tuple[int, ...] = (0,)
    held: tuple[int, ...] = (0,)
    fetched, total = 0, 0.0
    for _ in range(runs):
        for file in _files(path):
            (make_cold if cold else make_warm)(file)
        found = _run(method, path, size, dtype, world)
        if problems := [each.problem for each in found if each.problem]:
            return Cell(**{**asdict(cell), "problem": problems[0]}), None
        seconds.append(max(each.seconds for each in found))
        growth = max(growth, tuple(each.growth for each in found), key=sum)
        held = tuple(each.held for each in found)
        fetched = sum(each.fetched for each in found)
        total = sum(each.total for each in found)
    values: dict[str, Any] = {"seconds": tuple(seconds), "growth": growth, "held": held, "fetched": fetched}
    return Cell(**{**asdict(cell), **values}), total


def _cells(
    paths: Mapping[str, Path], size: str, worlds: tuple[int, ...], dtypes: tuple[str, ...], runs: int
) -> Iterator[Cell]:
    sums: dict[str, float] = {}
    for dtype, (kind, path), world, cold in product(dtypes, paths.items(), worlds, (True, False)):
        for name, method in METHODS.items():
            if kind not in method.reads:
                continue
            cell, total = _cell(name, kind, path, size, dtype, world, runs, cold=cold)
            if total is not None:
                expected = sums.setdefault(dtype, total)
                if abs(total - expected) > 1e-6 * max(1.0, abs(expected)):
                    cell = Cell(**{**asdict(cell), "problem": f"the weights add up to {total}, not {expected}"})
            yield cell


def table(cells: list[Cell], file_bytes: Mapping[str, int]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| file | dtype | ranks | page cache | method | s | fullest rank | its shard | host | read / file | remark |",
        "|---|---|---:|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for cell in cells:
        figures = "- | - | - | - | -"
        if cell.seconds:
            figures = (
                f"{median(cell.seconds):.2f} | {max(cell.growth) / MIB:,.0f} | {max(cell.held) / MIB:,.0f} | "
                f"{sum(cell.growth) / MIB:,.0f} | {cell.fetched / file_bytes[cell.file]:.2f}"
            )
        cache = "cold" if cell.cold else "cached"
        lines.append(
            f"| {cell.file} | {cell.dtype} | {cell.ranks} | {cache} | {cell.method} | {figures} | {cell.problem} |"
        )
    return lines


def _numbers(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", default="medium", show_default=True, help="Size of GPT-2.")
@click.option("--ranks", callback=_numbers, default="1,2,4", show_default=True, help="Numbers of processes.")
@click.option(
    "--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), show_default=True, help="Of the model."
)
@click.option("--file", "kinds", type=click.Choice([FILE, SHARDS, DCP]), multiple=True, help="Only this.")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Repetitions; tables show medians.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where the files go; they are removed.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
def main(
    size: str,
    ranks: tuple[int, ...],
    dtypes: tuple[str, ...],
    kinds: tuple[str, ...],
    runs: int,
    directory: Path | None,
    out: Path,
) -> None:
    """Load a divided model by 1 to 4 ranks of this host, with sluice and with what people use today."""
    console = console_for_tables()
    with temporary_folder(directory) as folder:
        paths = _write(folder, size)
        nbytes = {kind: sum(file.stat().st_size for file in _files(path)) for kind, path in paths.items()}
        chosen = {kind: path for kind, path in paths.items() if not kinds or kind in kinds}
        cells = []
        for cell in _cells(chosen, size, ranks, dtypes, runs):
            cells.append(cell)
            console.print(table([cell], nbytes)[-1], style="dim", markup=False, highlight=False, soft_wrap=True)
        described = _machine.describe(folder, ("torch", "sluice", "safetensors", "accelerate"))
    command = f"python -m bench.ranks --size {size} --ranks {','.join(map(str, ranks))} --runs {runs}"
    record = {"command": command, "machine": described, "cells": [asdict(cell) for cell in cells]}
    show_document(console, out, "ranks", record, table(cells, nbytes))


if __name__ == "__main__":
    main()
