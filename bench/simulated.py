"""``python3 -m bench.simulated``: memory of the tutorial's methods on the simulated device of the tests; no seconds.

The device is that of ``tests/support/simulated_device``: torch takes it for an accelerator, its allocator follows the
documented rules of CUDA's, and its memory is apart from the host's. Speeds of a GPU cannot be measured on it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import torch
from rich.console import Console

from bench._puzzle import Puzzle, make_file
from sluice._units import format_bytes
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, final_bytes, make_checkpoint
from sluice.benchmark.loads import run_job
from sluice.benchmark.records import MethodJob, Scenario
from sluice.benchmark.runner import run_with_progress
from sluice.benchmark.strategies import STRATEGIES
from sluice.benchmark.summary import summarise
from sluice.benchmark.table import TableSection, console_for_tables, print_section

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


def _tutorial(console: Console, size: str, folder: Path) -> TableSection:
    """Return the tutorial's table for a size, in fp32."""
    final = final_bytes(size, torch.float32)
    make_checkpoint(folder / "model.pth", size, torch.float32, "torch")
    make_checkpoint(folder / "parameters", size, torch.float32, "per-parameter")
    scenario = Scenario(
        title="sim",
        model=size,
        dtype="float32",
        device="sim",
        states=("warm",),
        checkpoints={
            each.name: folder / ("model.pth" if ".pth" in each.reads else "parameters") for each in STRATEGIES
        },
        final_bytes=final,
    )
    rows = []
    for row in summarise(scenario, run_with_progress(console, [scenario], repetitions=1)):
        published = [f"{gib / _PUBLISHED_FINAL:.2f}" for gib in PUBLISHED.get(row.method, ())] or ["-", "-"]
        peaks = (row.device_allocated_bytes, row.device_reserved_bytes, row.total_bytes)
        allocated, reserved, host = (f"{nbytes / final:.2f}" for nbytes in peaks)
        right = {True: "yes", False: "NO", None: "-"}[row.right]
        rows.append((row.method, allocated, reserved, published[0], host, published[1], right))
        if row.method == "sluice":
            _judge(size, row.device_reserved_bytes - final, row.total_bytes, right)
    return TableSection(
        title=f"GPT-2 {size}, fp32, on the simulated device: peaks in units of F = {format_bytes(final)}",
        headings=("method", "allocated", "reserved", "published GPU", "host", "published host", "right"),
        rows=tuple(rows),
        notes=("published: the tutorial's figures for GPT-2 XL on a GPU, divided by the 6.29 GiB of its weights",),
    )


def _puzzle(folder: Path) -> TableSection:
    """Return the outcome of each method on a device of 24 units, a host of 32 and a file of 40."""
    size = Puzzle(layers=_FILE_UNITS, width=_PUZZLE_WIDTH)
    unit = size.file_bytes // _FILE_UNITS
    make_file(folder / "puzzle.pth", size, threads=len(os.sched_getaffinity(0)))
    arguments = json.dumps({"layers": size.layers, "width": size.width})
    rows = []
    for method in (each.name for each in STRATEGIES if each.name != "per-parameter"):
        job = MethodJob(
            method=method,
            model="bench._puzzle:build",
            model_args=arguments,
            checkpoint=str(folder / "puzzle.pth"),
            dtype="bfloat16",
            device="sim",
            device_limit_bytes=_DEVICE_UNITS * unit,
            verify=False,
        )
        outcome = run_job(job)
        fits = outcome.status == "ok" and outcome.total_bytes <= _HOST_UNITS * unit
        why = "fits" if fits else ("the host is too small" if outcome.status == "ok" else "the device is too small")
        peaks = (outcome.device_reserved_bytes, outcome.total_bytes) if outcome.status == "ok" else (0, 0)
        rows.append((method, *(f"{peak / unit:.1f}" if peak else "-" for peak in peaks), why))
        if outcome.status != "ok" and "out of memory" not in outcome.reason.lower():
            raise click.ClickException(f"{method}: {outcome.reason}")
        if method == "sluice" and not fits:
            raise click.ClickException(f"sluice does not solve the puzzle: {why}")
    return TableSection(
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


def run(console: Console, sizes: Sequence[str], directory: Path | None) -> list[TableSection]:
    """Measure and print the tables."""
    _plug_in()
    sections = []
    for size in sizes:
        with temporary_folder(directory) as folder:
            sections.append(_tutorial(console, size, folder))
    with temporary_folder(directory) as folder:
        sections.append(_puzzle(folder))
    for section in sections:
        print_section(console, section)
    return sections


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", "sizes", type=click.Choice(SIZES), multiple=True, default=("small",), help="Size of GPT-2.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to put the files; else the temp folder.")
def main(sizes: Sequence[str], directory: Path | None) -> None:
    """Compare the memory of loaders on the simulated device."""
    run(console_for_tables(), sizes, directory)


if __name__ == "__main__":
    main()
