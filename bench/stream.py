"""``python -m bench.stream``: a model that does not fit runs from its file, by sluice and by other ways.

Each run is a new process in a control group whose limit is a share of the model and a constant, with a cold page cache.
The methods take turns. The first call of each process is not counted. A run without a limit gives the time to compute,
and raw reads of the streamed bytes give the time to read.

``--models`` counts instead what calls of models with nested lists read, and ``--generate`` measures tokens per second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from bench import _stream_generation as generation
from bench import _stream_nested as nested
from bench._common import options, run_alone, show, working_folder
from bench._raw import read_file
from bench._stream_methods import INFERENCE_ONLY, METHODS, PREPARATIONS, same_dtype_only
from bench._stream_models import LLAMA, MODELS, empty_state, file_dtype, write_model
from sluice._units import format_bytes
from sluice.benchmark.machine import make_cold
from sluice.benchmark.records import Outcome
from sluice.benchmark.results import TableSection

__all__ = ["main", "row"]

#: Memory of a process in addition to its weights: interpreter, libraries, staging, activations; with the imports of
#: transformers and accelerate.
_CONSTANT_BYTES, _LIBRARY_BYTES = 400 << 20, 800 << 20

#: Limit of the processes whose model fits.
_GENEROUS_BYTES = 1 << 40

#: Calls of each process, of which the first is not counted.
_CALLS = 4

#: Longest time of one process.
_TIMEOUT_SECONDS = 600

_HEADINGS = ("memory and method", "s per call", "of the least", "read", "group's peak", "right")


def _figures(runs: Sequence[Outcome]) -> tuple[float, float]:
    """Return the medians of seconds and bytes read of the counted calls."""
    calls = [call for run in runs for call in run.facts["calls"][1:]]
    return median(call["seconds"] for call in calls), median(call["read"] for call in calls)


def row(name: str, runs: Sequence[Outcome], loaded: Sequence[Outcome], bytes_per_second: float) -> tuple[str, ...]:
    """Return the cells of one method with one share of memory.

    Args:
        name: Share and method.
        runs: Its runs.
        loaded: Runs of the model that fits.
        bytes_per_second: Speed of raw reads.
    """
    good = [run for run in runs if run.status == "ok"]
    if not good:
        return (name, "-", "-", "-", "-", runs[0].reason)
    seconds, read = _figures(good)
    least = max(_figures(loaded)[0], read / bytes_per_second)
    same = all(run.facts["logits"] == loaded[0].facts["logits"] for run in good)
    peak = format_bytes(int(median(run.group_bytes for run in good)))
    return (name, f"{seconds:.2f}", f"{seconds / least:.2f}", format_bytes(int(read)), peak, "yes" if same else "NO")


def _raw_rate(path: Path) -> float:
    """Return the speed of direct reads of the whole file, in bytes per second."""
    make_cold(path)
    begin = time.perf_counter()
    read_file(str(path), direct=True, threads=8).close()
    return path.stat().st_size / (time.perf_counter() - begin)


def _run(method: str, job: Mapping[str, Any], limit_bytes: int) -> Outcome:
    make_cold(Path(job["path"]))
    arguments = {**job, "method": method}
    return run_alone(
        "bench._stream_methods:work", arguments, timeout_seconds=_TIMEOUT_SECONDS, host_limit_bytes=limit_bytes
    )


def _nested_section(folder: Path) -> TableSection:
    """Count what calls of the nested models read; no process has a limit."""
    title = "what calls read, at shares of the weights"
    return TableSection(title=title, headings=nested.HEADINGS, rows=tuple(nested.rows(folder)))


def _generation_section(size: str, share: int, folder: Path) -> TableSection:
    """Measure tokens per second of a GPT-2 of transformers."""
    path, nbytes = generation.write(size, folder)
    memory = nbytes * share // 100
    found = []
    for each, limit in ((memory, memory + 2 * _LIBRARY_BYTES), (None, _GENEROUS_BYTES)):
        make_cold(path)
        job = {"size": size, "path": str(path), "memory": each, "batches": generation.BATCHES}
        found.append(
            run_alone("bench._stream_generation:work", job, timeout_seconds=_TIMEOUT_SECONDS, host_limit_bytes=limit)
        )
        if found[-1].status != "ok":
            raise click.ClickException(found[-1].reason)
    title = f"GPT-2 {size} of transformers: {format_bytes(nbytes)}, {share} % in memory"
    return TableSection(title=title, headings=generation.HEADINGS, rows=tuple(generation.rows(*found)))


@click.command()
@options(sizes=MODELS, runs=5)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of the model; default: that of the file.")
@click.option("--share", "shares", type=int, multiple=True, default=(75, 50, 25), help="Percent of the model.")
@click.option(
    "--method",
    "methods",
    type=click.Choice(list(METHODS)),
    multiple=True,
    default=("sluice", "sluice, place=map", "mmap", "accelerate"),
)
@click.option("--file", "name", default="model.safetensors", show_default=True, help="Its suffix is its format.")
@click.option("--batch", default=1, show_default=True, help="Sequences of one call.")
@click.option("--tokens", default=1, show_default=True, help="Tokens of each sequence.")
@click.option("--train", is_flag=True, help="Measure steps that train an adapter of each linear layer instead.")
@click.option("--models", "models", is_flag=True, help="Count what calls of nested models read instead.")
@click.option("--generate", is_flag=True, help="Measure tokens per second of a GPT-2 by batch instead.")
def main(  # noqa: PLR0913, PLR0917  (a parameter for each option)
    size: str,
    runs: int,
    directory: Path | None,
    out: Path,
    dtype: str | None,
    shares: Sequence[int],
    methods: Sequence[str],
    name: str,
    batch: int,
    tokens: int,
    *,
    train: bool,
    models: bool,
    generate: bool,
) -> None:
    """Measure calls or steps of a model that does not fit into memory."""
    packages = ("torch", "sluice", "accelerate", "transformers", "diffusers")
    if models or generate:
        with working_folder(directory) as folder:
            own = _nested_section(folder) if models else _generation_section(size, shares[-1], folder)
        show(out, "stream", packages, [own])
        return
    stored = file_dtype(size)
    dtype = dtype or stored
    chosen = [each for each in methods if dtype == stored or not same_dtype_only(each)]
    if train:
        chosen = [each for each in chosen if each not in INFERENCE_ONLY]
    nbytes = sum(tensor.numel() for tensor in empty_state(size).values()) * getattr(torch, dtype).itemsize
    more = _LIBRARY_BYTES if size == LLAMA else _CONSTANT_BYTES
    rows = []
    with working_folder(directory) as folder:
        path = write_model(size, folder, name)
        job = {"size": size, "dtype": dtype, "batch": batch, "tokens": tokens, "path": str(path), "calls": _CALLS}
        job["train"] = train
        for method in chosen:
            if prepare := PREPARATIONS.get(method):
                prepare(path)
        loaded = [_run("loaded", {**job, "memory": 0}, _GENEROUS_BYTES) for _ in range(2)]
        if failed := [run.reason for run in loaded if run.status != "ok"]:
            raise click.ClickException(failed[0])
        rate = median(_raw_rate(path) for _ in range(3))
        for share in shares:
            memory = nbytes * share // 100
            done: dict[str, list[Outcome]] = {method: [] for method in chosen}
            for _ in range(runs):
                for method in chosen:
                    done[method].append(_run(method, {**job, "memory": memory}, memory + more))
            rows += [row(f"{share} %, {method}", done[method], loaded, rate) for method in chosen]
    title = (
        f"{size} in {dtype}: {format_bytes(nbytes)}; computes in {_figures(loaded)[0]:.2f} s; "
        f"raw reads {rate / 1e9:.2f} GB/s"
    )
    show(out, "stream", packages, [TableSection(title=title, headings=_HEADINGS, rows=tuple(rows))])


if __name__ == "__main__":
    main()
