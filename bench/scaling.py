"""``python -m bench.scaling``: fit the cost model to loads from throttled sources, and predict larger loads."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
from msgspec.structs import replace as replace_record
from safetensors.torch import save_file

import sluice
from bench.cost_model import FEATURES, Fit, Load, cross_validated_errors, fit, predict, terms
from sluice import _defaults as defaults
from sluice._units import format_bytes
from sluice.benchmark.folder import temporary_folder
from sluice.records import AccessFacts
from sluice.sources.forwarding import ForwardingSource
from sluice.sources.protocol import Source

__all__ = ["Line", "ThrottledSource", "measure", "report", "write_checkpoint"]

_MB = 10**6

#: The measured checkpoints: bytes, tensors, files.
_CHECKPOINTS = tuple((size * _MB, *parts) for size in (16, 128) for parts in ((8, 1), (2000, 1), (64, 32)))

#: The throttled sources: latency in seconds, bytes per second, parallel requests that suit them.
_LINES = ((0.0, 100_000 * _MB, 8), (0.0, 400 * _MB, 4), (0.002, 800 * _MB, 8), (0.02, 800 * _MB, 2))

#: The checkpoint of the predictions, with the default reads.
_LARGE = Load(
    nbytes=400e9,
    tensors=1200,
    files=80,
    requests=400e9 // defaults.READ_BYTES + 80,
    readers=defaults.WAITING_READERS,
    latency=0.0,
    bandwidth=1.0,
)

#: Places of the predictions: title, latency, bandwidth, cores; None for those of this machine.
_PLACES = (
    ("NVMe, 7 GB/s, 0.1 ms", 0.0001, 7e9, None),
    ("NVMe, 7 GB/s, 0.1 ms", 0.0001, 7e9, 64),
    ("network disk, 1 GB/s, 2 ms", 0.002, 1e9, None),
    ("network disk, 1 GB/s, 2 ms", 0.002, 1e9, 64),
)


class Line:
    """A shared connection to storage, which delays each read and carries a limited number of bytes per second.

    Args:
        latency: Time before each read, in seconds; reads of several threads wait at the same time.
        bandwidth: Bytes per second of all readers together.

    Attributes:
        requests: Number of reads so far.
        most_at_once: Most reads that were in flight at once.
    """

    def __init__(self, latency: float, bandwidth: float) -> None:
        self._latency = latency
        self._bandwidth = bandwidth
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._in_flight = 0
        self.requests = 0
        self.most_at_once = 0

    def carry(self, nbytes: int) -> None:
        """Sleep for the latency, then until the line has carried the bytes."""
        now = time.perf_counter()
        with self._lock:
            self.requests += 1
            self._in_flight += 1
            self.most_at_once = max(self.most_at_once, self._in_flight)
            self._free_at = max(self._free_at, now + self._latency) + nbytes / self._bandwidth
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))
        with self._lock:
            self._in_flight -= 1


class ThrottledSource(ForwardingSource):
    """A source that is read through a line.

    Args:
        source: The source of the bytes.
        line: The line, which several sources may share.
        parallel_requests: Number of requests that suit the line.
    """

    def __init__(self, source: Source, line: Line, parallel_requests: int) -> None:
        super().__init__(source)
        self._line = line
        self._parallel_requests = parallel_requests

    @property
    def access(self) -> AccessFacts:
        """Facts of the wrapped source with the parallelism of the line."""
        return replace_record(self._source.access, parallel_requests=self._parallel_requests)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """See ``Source``; the read waits for the line."""
        self._line.carry(nbytes)
        return self._source.read_at(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        """See ``Source``; the read waits for the line."""
        self._line.carry(len(buffer))
        return self._source.read_into(offset, buffer, direct=direct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One throttled load."""

    #: The load, with the requests and readers that were counted.
    load: Load
    #: Wall time of opening and loading, in seconds.
    seconds: float


def write_checkpoint(folder: Path, nbytes: int, tensors: int, files: int) -> None:
    """Write tensors of equal size into files of equal size, with an index."""
    folder.mkdir()
    places: dict[str, str] = {}
    for file in range(files):
        name = f"model-{file + 1:05d}-of-{files:05d}.safetensors"
        shard = {f"w{number}": torch.zeros(nbytes // tensors // 4) for number in range(file, tensors, files)}
        save_file(shard, folder / name)
        places.update(dict.fromkeys(shard, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _model(tensors: int, nbytes: int) -> torch.nn.Module:
    model = torch.nn.Module()
    for number in range(tensors):
        values = torch.empty(nbytes // tensors // 4, device="meta")
        model.register_parameter(f"w{number}", torch.nn.Parameter(values))
    return model


def measure(folder: Path, nbytes: int, tensors: int, *, latency: float, bandwidth: float, parallel: int) -> Measurement:
    """Open a checkpoint, load it through a line into a model on meta, and return the time of both."""
    model = _model(tensors, nbytes)
    line = Line(latency, bandwidth)
    begin = time.perf_counter()
    with sluice.open(folder) as checkpoint:
        files = checkpoint._files
        checkpoint._files = tuple(
            replace_record(file, source=ThrottledSource(file.source, line, parallel)) for file in files
        )
        sluice.load_into(model, checkpoint, device="cpu")
        seconds = time.perf_counter() - begin
    load = Load(
        nbytes=nbytes,
        tensors=tensors,
        files=len(files),
        requests=line.requests,
        readers=line.most_at_once,
        latency=latency,
        bandwidth=bandwidth,
    )
    return Measurement(load=load, seconds=seconds)


def _measure_all(parent: Path, runs: int) -> list[Measurement]:
    """Return the fastest of several runs of each combination: other processes only make a run longer."""
    fastest = []
    for nbytes, tensors, files in _CHECKPOINTS:
        folder = parent / f"{nbytes}-{tensors}-{files}"
        write_checkpoint(folder, nbytes, tensors, files)
        measure(folder, nbytes, tensors, latency=0.0, bandwidth=1e12, parallel=8)  # imports, and the page cache
        for latency, bandwidth, parallel in _LINES:
            repeated = [
                measure(folder, nbytes, tensors, latency=latency, bandwidth=bandwidth, parallel=parallel)
                for _ in range(runs)
            ]
            fastest.append(min(repeated, key=lambda each: each.seconds))
    return fastest


def report(measurements: Sequence[Measurement]) -> list[str]:
    """Return the measurements, the fit and the predictions as Markdown."""
    loads, seconds = [each.load for each in measurements], [each.seconds for each in measurements]
    fitted, errors = fit(loads, seconds), cross_validated_errors(loads, seconds)
    lines = ["| MB | tensors | files | latency ms | MB/s | reads | at once | seconds | residual | left out |"]
    lines.append("|" + "---:|" * 10)
    for each, residual, error in zip(measurements, fitted.residuals, errors, strict=True):
        load = each.load
        lines.append(
            f"| {load.nbytes / _MB:g} | {load.tensors:g} | {load.files:g} | {load.latency * 1e3:g} "
            f"| {load.bandwidth / _MB:g} | {load.requests:g} | {load.readers:g} | {each.seconds:.3f} "
            f"| {residual:+.3f} | {error:+.0%} |"
        )
    absolute = [abs(error) for error in errors]
    lines += ["", f"Cross-validated error: median {statistics.median(absolute):.0%}, largest {max(absolute):.0%}."]
    lines += ["", "| coefficient | seconds |", "|---|---:|"]
    lines += [f"| {name} | {each:.3g} |" for name, each in zip(FEATURES, fitted.coefficients, strict=True)]
    return [*lines, "", *_predictions(fitted), "", *_limits(fitted)]


def _large_loads() -> list[tuple[str, Load, float]]:
    """Return the title, load and ratio of working cores of each place."""
    here = len(os.sched_getaffinity(0))
    rows = []
    for title, latency, bandwidth, cores in _PLACES:
        load = replace(_LARGE, latency=latency, bandwidth=bandwidth)
        # Only readers touch the pages: further cores have no thread to run.
        ratio = min(cores or here, load.readers) / min(here, load.readers)
        rows.append((f"{title}, {cores or here} cores", load, ratio))
    return rows


def _predictions(fitted: Fit) -> list[str]:
    head = "| 400 GB from | serial s | bytes s | source s | total s | host memory | readers | reads | files |"
    lines = [head, "|---|" + "---:|" * 8]
    for title, load, ratio in _large_loads():
        *serial, byte, source = terms(fitted, load, cores_ratio=ratio)
        total = predict(fitted, load, cores_ratio=ratio)
        lines.append(
            f"| {title} | {sum(serial):.2f} | {byte:.0f} | {source:.0f} | {total.least:.0f} to {total.most:.0f} "
            f"| F + {format_bytes(_growth(load))} | {load.readers:g} | {load.requests:g} "
            f"| {min(load.files, defaults.OPEN_FILES):g} of {load.files:g} |"
        )
    return lines


def _growth(load: Load) -> int:
    """Return what the memory contract allows in addition to the weights; all tensors have 1 MiB or more."""
    return (64 << 20) + (32 << 20) + int(load.tensors) * ((2 << 10) + (8 << 10))


def _limits(fitted: Fit) -> list[str]:
    """Return where each term would take as long as the source."""
    lines = ["| 400 GB from | needed in flight | in flight | latency limit | tensors | files | source faster than |"]
    lines.append("|---|" + "---:|" * 6)
    for title, load, ratio in _large_loads():
        _, tensor, file, byte, source = terms(fitted, load, cores_ratio=ratio)
        lines.append(
            f"| {title} | {format_bytes(int(load.bandwidth * load.latency))} "
            f"| {format_bytes(int(load.readers * load.nbytes / load.requests))} | {load.most_latency * 1e3:.0f} ms "
            f"| {_times(load.tensors, source, tensor)} | {_times(load.files, source, file)} "
            f"| {_times(load.nbytes / 1e9, 1.0, byte)} GB/s |"
        )
    return lines


def _times(amount: float, limit: float, seconds: float) -> str:
    """Return the amount that takes ``limit`` seconds if ``amount`` takes ``seconds``."""
    return f"{amount * limit / seconds:,.3g}" if seconds else "none found"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Repetitions; the fastest counts.")
def main(runs: int) -> None:
    """Fit the cost model to loads from throttled sources and predict the load of a checkpoint of 400 GB."""
    with temporary_folder() as folder:
        measurements = _measure_all(folder, runs)
    click.echo("\n".join(report(measurements)))


if __name__ == "__main__":
    main()
