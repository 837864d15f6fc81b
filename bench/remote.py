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
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
from msgspec import Struct

from bench._rank_child import empty_model
from bench._raw_http import serving, taken_counts
from bench._remote_child import Job, Loaded, work
from bench._remote_methods import (
    BUCKET,
    CONTENDERS,
    METHODS,
    PTH,
    RAW,
    SAFETENSORS,
    SHARDS,
    Checkpoint,
    read_sums,
    sums_of,
)
from sluice.benchmark import machine as _machine
from sluice.benchmark.cache import make_warm
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, random_weight
from sluice.benchmark.results import show_document
from sluice.benchmark.table import console_for_tables
from sluice.benchmark.writing import write_checkpoint

__all__ = ["Cell", "Run", "default_cells", "main", "missing", "table"]

MIB = 1 << 20
_SHARD_COUNT = 16
_TIMEOUT_SECONDS = 180
_KINDS = (PTH, SAFETENSORS, SHARDS)
_DTYPES = ("float32", "bfloat16")
_LATENCIES, _GBITS = (0.0, 5.0, 50.0), (1.0, 10.0)
_LIBRARIES = ("torch", "sluice", "urllib3", "obstore", "fsspec", "aiohttp")
_PACKAGES = (*_LIBRARIES, "runai-model-streamer", "tensorizer", "s3torchconnector")


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
    loaded: Loaded
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
                if len(same) <= number and not any(run.loaded.problem for run in same):
                    yield cell, name


def _write(folder: Path, size: str) -> None:
    """Write the checkpoints in fp32, unless they are there, and the sums of their bits."""
    bucket = folder / BUCKET
    own = bucket / "model.tensors"  # of tensorizer
    if (folder / "sums.json").exists() and (own.exists() or find_spec("tensorizer") is None):
        return
    (bucket / SHARDS).mkdir(parents=True, exist_ok=True)
    state = {name: random_weight(name, tensor.shape) for name, tensor in empty_model(size).named_parameters()}
    write_checkpoint(state, bucket / "model.pth", "torch")
    write_checkpoint(state, bucket / "model.safetensors", "safetensors")
    if find_spec("tensorizer") is not None:
        write_checkpoint(state, own, "tensorizer")
    names = list(state)
    weight_map: dict[str, str] = {}
    for number in range(_SHARD_COUNT):
        file = f"model-{number + 1:05}-of-{_SHARD_COUNT:05}.safetensors"
        part = names[number * len(names) // _SHARD_COUNT : (number + 1) * len(names) // _SHARD_COUNT]
        write_checkpoint({name: state[name] for name in part}, bucket / SHARDS / file, "safetensors")
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (bucket / SHARDS / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "sums.json").write_text(json.dumps(sums_of(state)), encoding="utf-8")
    os.sync()


def _checkpoint(bucket: Path, kind: str, port: int) -> Checkpoint:
    files = sorted((bucket / SHARDS).glob("*.safetensors")) if kind == SHARDS else [bucket / f"model.{kind}"]
    sizes = tuple((str(file.relative_to(bucket)), file.stat().st_size) for file in files)
    return Checkpoint(port=port, kind=kind, files=sizes)


def _load(job: Job) -> Loaded:
    """Load in a new process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench._remote_child", "sluice.api.load"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_TIMEOUT_SECONDS):
            return Loaded(problem=f"not finished after {_TIMEOUT_SECONDS} s")
        answer: Loaded = ours.recv()
        process.join(5)
        return answer
    except EOFError:
        return Loaded(problem="killed")
    finally:
        process.kill()
        process.join()
        ours.close()


def _run(cell: Cell, method: str, folder: Path, size: str, port: int) -> Run:
    checkpoint = _checkpoint(folder / BUCKET, cell.kind, port)
    for name, _ in checkpoint.files if "own format" not in method else (("model.tensors", 0),):
        make_warm(folder / BUCKET / name)
    needed = sum(parameter.numel() for parameter in empty_model(size).parameters()) * 4
    finished = needed if cell.dtype == "float32" else needed // 2
    taken_counts(port)
    job = Job(
        method=method,
        checkpoint=checkpoint,
        size=size,
        dtype=cell.dtype,
        warm_bytes=2 * needed // 4096 * 4096,
        folder=str(folder),
    )
    loaded = _load(job)
    if loaded.total is not None and loaded.total != (expected := read_sums(folder)[cell.dtype]):
        loaded = Loaded(problem=f"wrong weights: bits add up to {loaded.total}, not {expected}")
    counts = taken_counts(port)
    return Run(
        cell=cell,
        method=method,
        loaded=loaded,
        needed=needed,
        finished=finished,
        requests=counts["requests"],
        received=counts["bytes"],
        server_cpu=counts["cpu"],
    )


def table(runs: Sequence[Run]) -> list[str]:
    """Return the lines of the table: medians, a row for each cell and method."""
    lines = [
        "| file | dtype | network | method | s | / raw | peak - F, MiB | CPU s | requests | bytes / needed | remark |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    grouped: dict[tuple[Cell, str], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.cell, run.method), []).append(run)
    order = list(dict.fromkeys(cell for cell, _ in grouped))
    names = list(METHODS)
    for cell, method in sorted(grouped, key=lambda each: (order.index(each[0]), names.index(each[1]))):
        same = grouped[cell, method]
        good = [run for run in same if not run.loaded.problem]
        raw = [
            run.loaded.seconds
            for run in runs
            if run.method == RAW and not run.loaded.problem and _network(run.cell) == _network(cell)
        ]
        start = f"| {cell.kind} | {cell.dtype} | {cell.gbit:g} Gbit/s, {cell.latency:g} ms | {method} | "
        if not good:
            lines.append(start + f"- | - | - | - | - | - | {same[-1].loaded.problem} |")
            continue
        lines.append(start + _figures(good, raw) + " |")
    return lines


def _runs(left: Sequence[tuple[Cell, str]], folder: Path, size: str, end: float) -> Iterator[Run | None]:
    """Load, network by network, and yield the runs; None for each that would begin after the end."""
    for network in dict.fromkeys((cell.gbit, cell.latency) for cell, _ in left):
        here = [(cell, method) for cell, method in left if (cell.gbit, cell.latency) == network]
        with serving(folder, latency=network[1] / 1e3, rate=network[0] * 1e9 / 8) as port:
            for cell, method in here:
                yield _run(cell, method, folder, size, port) if time.monotonic() < end else None


def _network(cell: Cell) -> tuple[str, float, float]:
    return cell.kind, cell.gbit, cell.latency


def _figures(good: Sequence[Run], raw: Sequence[float]) -> str:
    seconds = median(run.loaded.seconds for run in good)
    ratio = f"{seconds / median(raw):.2f}" if raw else "-"
    last = good[-1]
    fills = METHODS[last.method].fills
    over = max(run.loaded.growth - run.finished for run in good) / MIB
    share = last.received / max(1, last.needed)
    return (
        f"{seconds:.2f} | {ratio} | {f'{over:,.0f}' if fills else '-'} | "
        f"{median(run.loaded.cpu for run in good):.1f} | {last.requests:,} | {share:.3f} | "
    )


def _earlier(path: Path, size: str) -> list[Run]:
    """Return the runs of an earlier call with the same model."""
    if not path.exists():
        return []
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return msgspec.convert(found["runs"], list[Run]) if found.get("size") == size else []


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="large", show_default=True, help="Size of GPT-2.")
@click.option("--file", "kinds", type=click.Choice(_KINDS), multiple=True, default=_KINDS, help="Only this.")
@click.option("--dtype", "dtypes", type=click.Choice(_DTYPES), multiple=True, default=_DTYPES, help="Of the model.")
@click.option("--latency", "latencies", type=float, multiple=True, default=_LATENCIES, help="Milliseconds.")
@click.option("--gbit", "gbits", type=click.FloatRange(0, min_open=True), multiple=True, default=_GBITS, help="Rate.")
@click.option("--method", "methods", type=click.Choice(list(METHODS)), multiple=True, help="Only this.")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="Repetitions; tables show medians.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=14, show_default=True, help="Start no load later."
)
@click.option("--directory", type=click.Path(path_type=Path), help="Keep the checkpoints here and use those there are.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
def main(  # noqa: PLR0913, PLR0917  (a parameter for each option)
    size: str,
    kinds: tuple[str, ...],
    dtypes: tuple[str, ...],
    latencies: tuple[float, ...],
    gbits: tuple[float, ...],
    methods: tuple[str, ...],
    runs: int,
    minutes: float,
    directory: Path | None,
    out: Path,
) -> None:
    """Compare loads over a network. A later call with the same --out runs the loads that are left."""
    end = time.monotonic() + 60 * minutes
    console = console_for_tables()
    done = _earlier(out / "remote.json", size)
    with nullcontext(directory) if directory else temporary_folder() as folder:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, size)
        described = _machine.describe(folder, _PACKAGES)
        left = list(missing(default_cells(kinds, dtypes, latencies, gbits), methods, done, runs))
        late = 0
        for run in _runs(left, folder, size, end):
            if run is None:
                late += 1
                continue
            done.append(run)
            _show(console, run)
            _save(out, size, described, done)
    record = _save(out, size, described, done)
    show_document(console, out, "remote", record, table(done))
    if late:
        console.print(f"{late} loads are left: call the command again", markup=False, highlight=False)
    wrong = [run.method for run in done if "wrong weights" in run.loaded.problem]
    if wrong:
        raise click.ClickException(f"wrong weights: {', '.join(wrong)}")


def _show(console: Any, run: Run) -> None:
    console.print(table([run])[-1], style="dim", markup=False, highlight=False, soft_wrap=True)


def _save(out: Path, size: str, described: Mapping[str, str], done: Sequence[Run]) -> dict[str, Any]:
    command = f"python -m bench.remote --size {size}"
    record = {"command": command, "size": size, "machine": dict(described), "runs": msgspec.to_builtins(list(done))}
    out.mkdir(parents=True, exist_ok=True)
    (out / "remote.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    return record


if __name__ == "__main__":
    main()
