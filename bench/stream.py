"""``python -m bench.stream``: a model that does not fit runs from its file, by sluice and by other ways.

Each run is a new process in a control group whose limit is a share of the model and a constant, with a cold page cache.
The methods take turns. The first call of each process is not counted. A run without a limit gives the time to compute,
and raw reads of the streamed bytes give the time to read.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from bench._stream_child import METHODS, PREPARATIONS, same_dtype_only
from bench._stream_models import LLAMA, MODELS, empty_state, file_dtype, write_model
from sluice._units import format_bytes
from sluice.benchmark.cache import make_cold
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.raw import read_file
from sluice.measuring import run_limited

__all__ = ["main", "ratios"]

#: Memory of a process in addition to its weights: interpreter, libraries, staging, activations.
_CONSTANT_BYTES = 400 << 20

#: The same with the imports of transformers and accelerate.
_LIBRARY_BYTES = 800 << 20

#: Limit of the processes whose model fits.
_GENEROUS_BYTES = 1 << 40

#: Calls of each process.
_CALLS = 4

#: Longest time of one process.
_TIMEOUT_SECONDS = 600

Row = dict[str, Any]


def ratios(rows: Sequence[Row], compute_seconds: float, bytes_per_second: float) -> Iterator[Row]:
    """Yield the rows with the ratio of each to the time that reading or computing alone would take.

    Args:
        rows: Medians of each method for one share of memory.
        compute_seconds: Seconds of a call of the loaded model.
        bytes_per_second: Speed of raw reads.
    """
    for row in rows:
        if "seconds" not in row:
            yield row
            continue
        least = max(compute_seconds, row["read"] / bytes_per_second)
        yield {**row, "least": least, "ratio": row["seconds"] / least}


def _run(method: str, job: Row, limit_bytes: int) -> Row:
    make_cold(Path(job["path"]))
    done = run_limited(
        [sys.executable, "-m", "bench._stream_child", json.dumps({**job, "method": method})],
        limit_bytes,
        env=dict(os.environ),
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    if done.returncode:
        reason = "killed at the limit" if done.oom_killed else (done.stderr.strip().splitlines() or ["?"])[-1]
        return {"failed": reason}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    counted = found["calls"][1:]
    return {
        "seconds": statistics.median(call["seconds"] for call in counted),
        "read": statistics.median(call["read"] for call in counted),
        "peak": done.peak_bytes,
        "logits": found["logits"],
    }


def _median(method: str, runs: Sequence[Row]) -> Row:
    good = [run for run in runs if "seconds" in run]
    if not good:
        return {"method": method, "failed": runs[0]["failed"]}
    return {
        "method": method,
        "logits": good[0]["logits"],
        **{name: statistics.median(run[name] for run in good) for name in ("seconds", "read", "peak")},
    }


def _raw_rate(path: Path) -> float:
    """Return the speed of direct reads of the whole file, in bytes per second."""
    make_cold(path)
    begin = time.perf_counter()
    read_file(str(path), direct=True, threads=8).close()
    return path.stat().st_size / (time.perf_counter() - begin)


def _cells(rows: Sequence[Row], share: int, loaded: Row) -> Iterator[Sequence[str]]:
    for row in rows:
        if "failed" in row:
            yield (f"{share} %", row["method"], "-", "-", "-", "-", row["failed"])
        else:
            same = "yes" if row["logits"] == loaded["logits"] else "NO"
            yield (
                f"{share} %",
                row["method"],
                f"{row['seconds']:.2f}",
                f"{row['ratio']:.2f}",
                format_bytes(row["read"]),
                format_bytes(row["peak"]),
                same,
            )


@click.command()
@click.option("--size", type=click.Choice(MODELS), default="large", show_default=True, help="Of GPT-2, or another.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default=None, help="Of the model.  [default: of the file]"
)
@click.option("--shares", default="75,50,25", show_default=True, help="Memory for weights, in percent of the model.")
@click.option("--methods", default="sluice,sluice place=map,mmap,accelerate", show_default=True)
@click.option("--file", "name", default="model.safetensors", show_default=True, help="Its suffix is its format.")
@click.option("--batch", default=1, show_default=True, help="Sequences of one call.")
@click.option("--tokens", default=1, show_default=True, help="Tokens of each sequence.")
@click.option("--rounds", default=5, show_default=True, help="Processes of each method.")
@click.option("--directory", type=click.Path(path_type=Path), default=None, help="Where the checkpoint is made.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None, help="Write all runs to a file.")
def main(  # noqa: PLR0913, PLR0917  (a parameter for each option)
    size: str,
    dtype: str | None,
    shares: str,
    methods: str,
    name: str,
    batch: int,
    tokens: int,
    rounds: int,
    directory: Path | None,
    json_path: Path | None,
) -> None:
    """Measure calls of a model that does not fit into memory."""
    chosen = [each.strip().replace(" place=", ", place=") for each in methods.split(",")]
    unknown = [each for each in chosen if each not in METHODS]
    if unknown:
        raise click.UsageError(f"unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    dtype = dtype or file_dtype(size)
    if dtype != file_dtype(size):
        chosen = [each for each in chosen if not same_dtype_only(each)]
    nbytes = sum(tensor.numel() for tensor in empty_state(size).values()) * getattr(torch, dtype).itemsize
    table: list[Sequence[str]] = []
    document: Row = {"size": size, "dtype": dtype, "batch": batch, "tokens": tokens, "bytes": nbytes, "shares": {}}
    with temporary_folder(directory) as folder:
        path = write_model(size, folder, name)
        job = {"size": size, "dtype": dtype, "batch": batch, "tokens": tokens, "path": str(path)}
        job |= {"calls": _CALLS, "memory": 0}
        for method in chosen:
            if prepare := PREPARATIONS.get(method):
                prepare(path)
        loaded = _median("loaded", [_run("loaded", job, _GENEROUS_BYTES) for _ in range(2)])
        rate = statistics.median(_raw_rate(path) for _ in range(3))
        computes = f"{size} in {dtype}: {format_bytes(nbytes)}; computes in {loaded['seconds']:.2f} s"
        click.echo(f"{computes}; raw reads {rate / 1e9:.2f} GB/s")
        document |= {"loaded": loaded, "raw_bytes_per_second": rate}
        for share in map(int, shares.split(",")):
            memory, more = nbytes * share // 100, _LIBRARY_BYTES if size == LLAMA else _CONSTANT_BYTES
            runs: dict[str, list[Row]] = {method: [] for method in chosen}
            for _ in range(rounds):
                for method in chosen:
                    runs[method].append(_run(method, {**job, "memory": memory}, memory + more))
            rows = list(ratios([_median(method, runs[method]) for method in chosen], loaded["seconds"], rate))
            document["shares"][share] = {"rows": rows, "runs": runs}
            table.extend(_cells(rows, share, loaded))
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=1))
    headers = ("memory", "method", "s per call", "of the least", "read", "group's peak", "right")
    click.echo(" | ".join(headers))
    for row in table:
        click.echo(" | ".join(row))


if __name__ == "__main__":
    main()
