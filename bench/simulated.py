"""``python3 -m bench.simulated``: memory of the tutorial's methods on the simulated device of the tests; no seconds.

The device is that of ``tests/support/simulated_device``: torch takes it for an accelerator, its allocator follows the
documented rules of CUDA's, and its memory is apart from the host's. Speeds of a GPU cannot be measured on it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import torch
from rich.console import Console

from bench._gpu_report import Section, print_sections
from bench._puzzle import Puzzle, make_file
from sluice._units import format_bytes
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, final_bytes, make_checkpoint
from sluice.benchmark.process import run_job
from sluice.benchmark.records import MethodJob, Outcome
from sluice.benchmark.runner import REFERENCE
from sluice.benchmark.strategies import STRATEGIES
from sluice.benchmark.table import console_for_tables

__all__ = ["PUBLISHED", "main", "run"]

_TESTS = Path(__file__).resolve().parents[1] / "tests"

#: Peaks of device and host that the tutorial published for GPT-2 XL in fp32, in GiB, and the size of its weights.
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "naive": (12.8, 4.4),
    "sequential": (6.7, 6.3),
    "meta-sequential": (12.8, 1.3),
    "mmap": (6.4, 5.9),
    "per-parameter": (6.4, 0.3),
}
_PUBLISHED_FINAL = 6.29

#: The puzzle of pytorch issue 75242 in units: the device, the host, and the fp32 checkpoint.
_DEVICE_UNITS, _HOST_UNITS, _FILE_UNITS = 24, 32, 40

#: Rows and columns of the puzzle's matrices; each takes one unit in the file.
_PUZZLE_WIDTH = 2048

#: Permitted memory in addition to F on the device, and permitted growth of the host.
_EXTRA_BYTES, _HOST_BYTES = 40 << 20, 150 << 20


def _plug_in() -> None:
    """Let this process and those that it starts import torch with the device."""
    sys.path.append(str(_TESTS))
    from support import simulated_device

    if reason := simulated_device.reason_against():
        raise click.ClickException(reason)
    sys.path.append(str(simulated_device.AUTOLOAD))
    simulated_device.plug_in()


def _load(method: str, job: MethodJob, path: Path) -> Outcome:
    return run_job(
        MethodJob(
            method=method,
            model=job.model,
            model_args=job.model_args,
            checkpoint=str(path),
            dtype=job.dtype,
            device="cpu" if method == REFERENCE else job.device,
            device_limit_bytes=None if method == REFERENCE else job.device_limit_bytes,
            verify=True,
        )
    )


def _outcomes(job: MethodJob, paths: Mapping[str, Path]) -> Iterator[tuple[str, Outcome, str]]:
    """Yield each method with its outcome and a word about its weights."""
    truth = _load(REFERENCE, job, next(iter(paths.values()))) if job.model in SIZES else None
    for method, path in paths.items():
        outcome = _load(method, job, path)
        if outcome.verdict is None or truth is None or truth.verdict is None:
            right = "-"
        else:
            right = "yes" if outcome.verdict.weights == truth.verdict.weights else "NO"
        yield method, outcome, right


def _ratio(nbytes: int, final: int) -> str:
    return f"{nbytes / final:.2f}"


def _tutorial(size: str, folder: Path) -> Section:
    """Return the tutorial's table for a size, in fp32."""
    final = final_bytes(size, torch.float32)
    make_checkpoint(folder / "model.pth", size, torch.float32, "torch")
    make_checkpoint(folder / "parameters", size, torch.float32, "per-parameter")
    paths = {each.name: folder / ("model.pth" if ".pth" in each.reads else "parameters") for each in STRATEGIES}
    job = MethodJob(method="", model=size, checkpoint="", dtype="float32", device="sim", verify=True)
    rows = []
    for method, outcome, right in _outcomes(job, paths):
        published = [f"{gib / _PUBLISHED_FINAL:.2f}" for gib in PUBLISHED.get(method, ())] or ["-", "-"]
        device = (_ratio(each, final) for each in (outcome.device_allocated_bytes, outcome.device_reserved_bytes))
        rows.append((method, *device, published[0], _ratio(outcome.total_bytes, final), published[1], right))
        if method == "sluice":
            _judge(size, outcome.device_reserved_bytes - final, outcome.total_bytes, right)
    return Section(
        title=f"GPT-2 {size}, fp32, on the simulated device: peaks in units of F = {format_bytes(final)}",
        headings=("method", "allocated", "reserved", "published GPU", "host", "published host", "right"),
        rows=tuple(rows),
        notes=("published: the tutorial's figures for GPT-2 XL on a GPU, divided by the 6.29 GiB of its weights",),
    )


def _puzzle(folder: Path) -> Section:
    """Return the outcome of each method on a device of 24 units, a host of 32 and a file of 40."""
    size = Puzzle(layers=_FILE_UNITS, width=_PUZZLE_WIDTH)
    unit = size.file_bytes // _FILE_UNITS
    make_file(folder / "puzzle.pth", size, threads=len(os.sched_getaffinity(0)))
    job = MethodJob(
        method="",
        model="bench._puzzle:build",
        model_args=json.dumps({"layers": size.layers, "width": size.width}),
        checkpoint="",
        dtype="bfloat16",
        device="sim",
        device_limit_bytes=_DEVICE_UNITS * unit,
        verify=True,
    )
    paths = {each.name: folder / "puzzle.pth" for each in STRATEGIES if each.name != "per-parameter"}
    rows = []
    for method, outcome, _ in _outcomes(job, paths):
        fits = outcome.status == "ok" and outcome.total_bytes <= _HOST_UNITS * unit
        why = "fits" if fits else ("the host is too small" if outcome.status == "ok" else "the device is too small")
        peaks = (outcome.device_reserved_bytes, outcome.total_bytes) if outcome.status == "ok" else (0, 0)
        rows.append((method, *(f"{peak / unit:.1f}" if peak else "-" for peak in peaks), why))
        if outcome.status != "ok" and "out of memory" not in outcome.reason.lower():
            raise click.ClickException(f"{method}: {outcome.reason}")
        if method == "sluice" and not fits:
            raise click.ClickException(f"sluice does not solve the puzzle: {why}")
    return Section(
        title=f"The puzzle on the simulated device: 24 units of device, 32 of host, a file of 40; F is 20 units of "
        f"{format_bytes(unit)}",
        headings=("method", "reserved, units", "host, units", "outcome"),
        rows=tuple(rows),
        notes=("the limit of the device is enforced by its allocator; host memory is growth, compared with the limit",),
    )


def _judge(size: str, extra_bytes: int, host_bytes: int, right: str) -> None:
    if right != "yes" or extra_bytes > _EXTRA_BYTES or host_bytes > _HOST_BYTES:
        found = f"F + {format_bytes(extra_bytes)} reserved, host {format_bytes(host_bytes)}, weights right: {right}"
        raise click.ClickException(f"sluice misses its bounds for GPT-2 {size}: {found}")


def run(console: Console, sizes: Sequence[str], directory: Path | None) -> list[Section]:
    """Measure and print the tables."""
    _plug_in()
    sections = []
    for size in sizes:
        with temporary_folder(directory) as folder:
            sections.append(_tutorial(size, folder))
    with temporary_folder(directory) as folder:
        sections.append(_puzzle(folder))
    print_sections(console, sections)
    return sections


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", "sizes", type=click.Choice(SIZES), multiple=True, default=("small",), help="Size of GPT-2.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to put the files; else the temp folder.")
def main(sizes: Sequence[str], directory: Path | None) -> None:
    """Compare the memory of loaders on the simulated device."""
    run(console_for_tables(), sizes, directory)


if __name__ == "__main__":
    main()
