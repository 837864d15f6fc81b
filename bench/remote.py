"""``python -m bench.remote``: loads of one model from a server on this machine that behaves like a network.

The server has a latency and a rate that all connections share (``bench/_remote_server.py``); it counts requests and
bytes. Each load runs in a new process; the methods of a cell run in turn, with a raw client that only receives the
bytes. The clock starts after imports and the empty model, and stops when every weight was touched. Memory is the growth
of the process from there, as the kernel records it (``VmHWM``). Every load must finish with the bits that were written.

Client and server share the processors of this machine. A cell is limited by the network only where its rate is below
what the raw client reaches without one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
import torch
from msgspec import Struct

from bench._common import options, run_alone, show_document, working_folder, write_shards
from bench._raw_http import serving, taken_counts
from bench._remote_methods import (
    BUCKET,
    CONTENDERS,
    METHODS,
    PTH,
    RAW,
    SAFETENSORS,
    SHARDS,
    Checkpoint,
    bit_sum,
    environment,
    read_sums,
    sums_of,
)
from bench.ranks import empty_model
from sluice.benchmark import machine as _machine
from sluice.benchmark.gpt2 import random_weight, write_checkpoint
from sluice.benchmark.machine import make_warm
from sluice.benchmark.records import Work
from sluice.benchmark.results import TableSection

__all__ = ["Cell", "Run", "default_cells", "main", "missing", "section", "work"]

MIB = 1 << 20
_PAGE_BYTES = 4096
_SHARD_COUNT = 16
_TIMEOUT_SECONDS = 180
_KINDS = (PTH, SAFETENSORS, SHARDS)
_DTYPES = ("float32", "bfloat16")
_LATENCIES, _GBITS = (0.0, 5.0, 50.0), (1.0, 10.0)
_LIBRARIES = ("torch", "sluice", "urllib3", "obstore", "fsspec", "aiohttp")
_PACKAGES = (*_LIBRARIES, "runai-model-streamer", "s3torchconnector")


def work(method: str, checkpoint: dict[str, Any], size: str, dtype: str, folder: str) -> Work:
    """Load once: the work of a process. Returns the sum of the bit patterns of the weights, if it fills the model."""
    chosen, source = METHODS[method], msgspec.convert(checkpoint, Checkpoint)
    os.environ |= {**environment(source), "SLUICE_BENCH_FOLDER": folder}
    for name in chosen.imports:
        import_module(name)
    model = empty_model(size).to(getattr(torch, dtype))
    yield
    yield
    chosen.load(model, source)
    weights = [each.detach().reshape(-1) for each in model.parameters()] if chosen.fills else []
    for each in weights:
        each[:: _PAGE_BYTES // each.element_size()].sum()  # reads a value of every page
    yield
    return {"total": sum(bit_sum(each) for each in weights) if chosen.fills else None}


class Cell(Struct, frozen=True, kw_only=True):
    """A checkpoint, a dtype and a network."""

    kind: str
    dtype: str
    #: Milliseconds before each answer.
    latency: float
    #: Gbit/s of all connections.
    gbit: float


class Run(Struct, frozen=True, kw_only=True):
    """One load."""

    cell: Cell
    method: str
    seconds: float = 0.0
    #: Processor time of the process.
    cpu: float = 0.0
    #: Growth of memory, in bytes.
    growth: int = 0
    #: Why there is no result.
    problem: str = ""
    #: Bytes of the tensors in the file, and of the finished ones.
    needed: int = 0
    finished: int = 0
    requests: int = 0
    received: int = 0
    #: Processor time of the server.
    server_cpu: float = 0.0


def default_cells(
    kinds: Sequence[str], dtypes: Sequence[str], latencies: Sequence[float], gbits: Sequence[float]
) -> list[tuple[Cell, tuple[str, ...]]]:
    """Return the cells with their methods, the most telling first.

    Peers are compared on the fastest network with the middle latency; only the contenders run on the others. The raw
    client runs with the first dtype only: it receives the same bytes for the others.
    """
    middle = sorted(latencies)[len(latencies) // 2]
    networks = sorted(product(gbits, latencies), key=lambda each: (each != (max(gbits), middle), -each[0], each[1]))
    return [
        (
            Cell(kind=kind, dtype=dtype, latency=latency, gbit=gbit),
            tuple(
                name
                for name in METHODS
                if ((gbit, latency) == (max(gbits), middle) or name in CONTENDERS)
                and (name != RAW or dtype == dtypes[0])
            ),
        )
        for (gbit, latency), kind, dtype in product(networks, kinds, dtypes)
    ]


def missing(
    cells: Iterable[tuple[Cell, tuple[str, ...]]], methods: Sequence[str], done: Sequence[Run], runs: int
) -> Iterator[tuple[Cell, str]]:
    """Yield the loads that are left: each repetition of a cell starts with a different method.

    A method that had no result in a cell is not repeated there.
    """
    chosen = list(cells)
    for number in range(runs):
        for cell, names in chosen:
            wanted = [name for name in methods if name != RAW or name in names] or names
            able = [name for name in wanted if cell.kind in METHODS[name].reads]
            for name in able[number % len(able) :] + able[: number % len(able)] if able else []:
                same = [run for run in done if (run.cell, run.method) == (cell, name)]
                if len(same) <= number and not any(run.problem for run in same):
                    yield cell, name


def _write(folder: Path, size: str) -> None:
    """Write the checkpoints in fp32, unless they are there, and the sums of their bits."""
    bucket = folder / BUCKET
    if (folder / "sums.json").exists():
        return
    bucket.mkdir(parents=True, exist_ok=True)
    state = {name: random_weight(name, tensor.shape) for name, tensor in empty_model(size).named_parameters()}
    write_checkpoint(state, bucket / "model.pth")
    write_checkpoint(state, bucket / "model.safetensors")
    write_shards(state, bucket / SHARDS, _SHARD_COUNT)
    (folder / "sums.json").write_text(json.dumps(sums_of(state)), encoding="utf-8")
    os.sync()


def _checkpoint(bucket: Path, kind: str, port: int) -> Checkpoint:
    files = sorted((bucket / SHARDS).glob("*.safetensors")) if kind == SHARDS else [bucket / f"model.{kind}"]
    sizes = tuple((str(file.relative_to(bucket)), file.stat().st_size) for file in files)
    return Checkpoint(port=port, kind=kind, files=sizes)


def _run(cell: Cell, method: str, folder: Path, size: str, port: int) -> Run:
    checkpoint = _checkpoint(folder / BUCKET, cell.kind, port)
    for name, _ in checkpoint.files:
        make_warm(folder / BUCKET / name)
    needed = sum(parameter.numel() for parameter in empty_model(size).parameters()) * 4
    finished = needed if cell.dtype == "float32" else needed // 2
    taken_counts(port)
    job = {"method": method, "checkpoint": msgspec.to_builtins(checkpoint), "size": size, "dtype": cell.dtype}
    arguments = {**job, "folder": str(folder)}
    found = run_alone("bench.remote:work", arguments, claimed_bytes=2 * needed, timeout_seconds=_TIMEOUT_SECONDS)
    problem, total, expected = found.reason, found.facts.get("total"), read_sums(folder)[cell.dtype]
    if total not in {None, expected}:
        problem = f"wrong weights: bits add up to {total}, not {expected}"
    counts = taken_counts(port)
    return Run(
        cell=cell,
        method=method,
        seconds=found.seconds,
        cpu=found.cpu_seconds,
        growth=found.total_bytes,
        problem=problem,
        needed=needed,
        finished=finished,
        requests=counts["requests"],
        received=counts["bytes"],
        server_cpu=counts["cpu"],
    )


def section(runs: Sequence[Run]) -> TableSection:
    """Return the table: medians, a row for each cell and method."""
    grouped: dict[tuple[Cell, str], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.cell, run.method), []).append(run)
    order, names = list(dict.fromkeys(cell for cell, _ in grouped)), list(METHODS)
    rows = []
    for cell, method in sorted(grouped, key=lambda each: (order.index(each[0]), names.index(each[1]))):
        same = grouped[cell, method]
        good = [run for run in same if not run.problem]
        network = (cell.kind, cell.gbit, cell.latency)
        raw = [
            run.seconds
            for run in runs
            if run.method == RAW and not run.problem and (run.cell.kind, run.cell.gbit, run.cell.latency) == network
        ]
        start = (method, cell.kind, cell.dtype, f"{cell.gbit:g} Gbit/s, {cell.latency:g} ms")
        rows.append((*start, *(_figures(good, raw) if good else ("-",) * 6), same[-1].problem))
    headings = ("method", "file", "dtype", "network", "s", "/ raw", "peak - F, MiB", "CPU s", "requests")
    return TableSection(title="", headings=(*headings, "bytes / needed", "remark"), rows=tuple(rows))


def _runs(left: Sequence[tuple[Cell, str]], folder: Path, size: str, end: float) -> Iterator[Run | None]:
    """Load, network by network, and yield the runs; None for each that would begin after the end."""
    for network in dict.fromkeys((cell.gbit, cell.latency) for cell, _ in left):
        here = [(cell, method) for cell, method in left if (cell.gbit, cell.latency) == network]
        with serving(folder, latency=network[1] / 1e3, rate=network[0] * 1e9 / 8) as port:
            for cell, method in here:
                yield _run(cell, method, folder, size, port) if time.monotonic() < end else None


def _figures(good: Sequence[Run], raw: Sequence[float]) -> tuple[str, ...]:
    seconds, last = median(run.seconds for run in good), good[-1]
    over = max(run.growth - run.finished for run in good) / MIB
    return (
        f"{seconds:.2f}",
        f"{seconds / median(raw):.2f}" if raw else "-",
        f"{over:,.0f}" if METHODS[last.method].fills else "-",
        f"{median(run.cpu for run in good):.1f}",
        f"{last.requests:,}",
        f"{last.received / max(1, last.needed):.3f}",
    )


def _earlier(path: Path, size: str) -> list[Run]:
    """Return the runs of an earlier call with the same model."""
    if not path.exists():
        return []
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return msgspec.convert(found["runs"], list[Run]) if found.get("size") == size else []


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options(runs=1)
@click.option("--file", "kinds", type=click.Choice(_KINDS), multiple=True, default=_KINDS, help="Only this.")
@click.option("--dtype", "dtypes", type=click.Choice(_DTYPES), multiple=True, default=_DTYPES, help="Of the model.")
@click.option("--latency", "latencies", type=float, multiple=True, default=_LATENCIES, help="Milliseconds.")
@click.option("--gbit", "gbits", type=click.FloatRange(0, min_open=True), multiple=True, default=_GBITS, help="Rate.")
@click.option("--method", "methods", type=click.Choice(list(METHODS)), multiple=True, help="Only this.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=14, show_default=True, help="Start no load later."
)
def main(  # noqa: PLR0913, PLR0917  (a parameter for each option)
    size: str,
    runs: int,
    directory: Path | None,
    out: Path,
    kinds: tuple[str, ...],
    dtypes: tuple[str, ...],
    latencies: tuple[float, ...],
    gbits: tuple[float, ...],
    methods: tuple[str, ...],
    minutes: float,
) -> None:
    """Compare loads over a network. A later call with the same --out runs the loads that are left."""
    end = time.monotonic() + 60 * minutes
    done = _earlier(out / "remote.json", size)
    with working_folder(directory) as folder:
        _write(folder, size)
        described = _machine.describe(folder, _PACKAGES)
        late = 0
        left = list(missing(default_cells(kinds, dtypes, latencies, gbits), methods, done, runs))
        for run in _runs(left, folder, size, end):
            if run is None:
                late += 1
                continue
            done.append(run)
            click.echo(" | ".join(section([run]).rows[-1]))
            _save(out, size, described, done)
    show_document(out, "remote", _save(out, size, described, done), [section(done)])
    if late:
        click.echo(f"{late} loads are left: call the command again")
    wrong = [run.method for run in done if "wrong weights" in run.problem]
    if wrong:
        raise click.ClickException(f"wrong weights: {', '.join(wrong)}")


def _save(out: Path, size: str, described: Mapping[str, str], done: Sequence[Run]) -> dict[str, Any]:
    command = f"python -m bench.remote --size {size}"
    record = {"command": command, "size": size, "machine": dict(described), "runs": msgspec.to_builtins(list(done))}
    out.mkdir(parents=True, exist_ok=True)
    (out / "remote.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    return record


if __name__ == "__main__":
    main()
