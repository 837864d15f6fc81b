"""``python -m bench.small``: loads of cached files in a warm process, from 8 small tensors to 1 GB.

One process loads every file with each method in turn, so that what is measured is the call and not the imports. The
module is built before the clock starts: with real parameters for methods that copy, on meta for those that assign. The
modules are nested, with at most 32 children each, because ``load_state_dict`` compares every name with every child.

A method that maps the file leaves the reading of its pages to the first use. So the time of a load is that of the call
and what the first touch of all weights takes longer than the second.

The goal: into real parameters and onto meta at most 1.2 times the fastest other method, and from 50 MB on faster than
all. The command fails if it is missed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click
import torch
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

import sluice
from sluice.benchmark.machine import temporary_folder
from sluice.benchmark.results import console_for_tables

__all__ = ["Row", "main"]

#: Numbers of tensors and megabytes of a file.
SIZES = (
    (8, 0.1),
    (8, 10.0),
    (100, 1.0),
    (100, 10.0),
    (300, 50.0),
    (300, 1000.0),
    (2000, 10.0),
    (2000, 100.0),
    (10_000, 40.0),
    (100_000, 100.0),
)

_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}

#: A file of this size or more must load faster than with any other method.
_LARGE_MEGABYTES = 50

_FORMATS = ("pth", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians of one file, in seconds, or in seconds of processor time."""

    #: Description of the file.
    what: str
    #: Megabytes of its tensors.
    megabytes: float
    #: Seconds of sluice into real parameters and into a module on meta.
    ours: tuple[float, float]
    #: Seconds of each other method.
    others: dict[str, float]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The two loads of sluice, each relative to the fastest other method."""
        return tuple(seconds / min(self.others.values()) for seconds in self.ours)

    @property
    def ratio(self) -> float:
        """The larger of the two ratios, which the goal is about."""
        return max(self.ratios)

    @property
    def kept(self) -> bool:
        """Whether the goal is reached."""
        return self.ratio < 1 if self.megabytes >= _LARGE_MEGABYTES else self.ratio <= 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """How long a file is measured, and by which clock."""

    #: Most loads per method.
    runs: int
    #: Seconds after which no further round is started.
    cell_seconds: float
    #: Returns the present time, in seconds.
    clock: Callable[[], float]


def module_of(tensors: int, numel: int) -> nn.Module:
    """Return a module with this number of parameters: 8 in each leaf, at most 32 children in each other module."""
    module = nn.Module()
    if tensors <= 8:
        for number in range(tensors):
            module.register_parameter(f"p{number}", nn.Parameter(torch.empty(numel)))
        return module
    share = -(-tensors // (8 if tensors <= 64 else 32))
    share = -(-share // 8) * 8
    for number, first in enumerate(range(0, tensors, share)):
        module.add_module(f"part{number}", module_of(min(share, tensors - first), numel))
    return module


def _others(path: Path) -> dict[str, tuple[str, Callable[[nn.Module], object]]]:
    """Return the other methods: the device on which each needs its module, and the load."""
    file = str(path)
    if path.suffix == ".safetensors":
        return {
            "safetensors, copied": ("cpu", lambda module: module.load_state_dict(load_file(file))),
            "safetensors, assigned": ("meta", lambda module: module.load_state_dict(load_file(file), assign=True)),
        }
    return {
        "torch.load, copied": ("cpu", lambda module: module.load_state_dict(torch.load(file))),
        "torch.load, mmap, assigned": (
            "meta",
            lambda module: module.load_state_dict(torch.load(file, mmap=True), assign=True),
        ),
    }


def _touch(module: nn.Module) -> None:
    """Read one element of each page of the weights."""
    for parameter in module.parameters():
        parameter.detach()[::1024].sum()


def _seconds(load: Callable[[nn.Module], object], module: nn.Module, clock: Callable[[], float]) -> float:
    """Return the time of a load with its first touch, without what a touch takes of itself."""
    gc.collect()
    times = [clock()]
    for step in (load, _touch, _touch):
        step(module)
        times.append(clock())
    loaded, first, second = (end - start for start, end in pairwise(times))
    return loaded + max(0.0, first - second)


def _measure(path: Path, tensors: int, numel: int, megabytes: float, limits: _Limits) -> Row:
    others = _others(path)
    methods = dict(others)
    for device in ("cpu", "meta"):
        methods[f"sluice, {device}"] = (device, lambda module: sluice.load_into(module, path))
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    started = time.perf_counter()
    while max(map(len, seconds.values())) < limits.runs:
        first = time.perf_counter() - started
        for name, (device, load) in methods.items():
            with torch.device(device):
                module = module_of(tensors, numel)
            seconds[name].append(_seconds(load, module, limits.clock))
            del module
        spent = time.perf_counter() - started
        if not first and spent < limits.cell_seconds / 2:
            seconds = {name: [] for name in methods}  # the first round is the warm-up, unless it took too long
        elif spent > limits.cell_seconds:
            break
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return Row(
        what=f"{tensors} tensors, {megabytes:g} MB, {path.suffix}",
        megabytes=megabytes,
        ours=(medians["sluice, cpu"], medians["sluice, meta"]),
        others={name: medians[name] for name in others},
    )


def _rows(folder: Path, sizes: Sequence[tuple[int, float]], limits: _Limits) -> Iterator[Row]:
    for tensors, megabytes in sizes:
        numel = max(1, round(megabytes * 1e6 / 4 / tensors))
        for suffix in _FORMATS:
            path = folder / f"file.{suffix}"
            state = {name: torch.randn(numel) for name in module_of(tensors, numel).state_dict()}
            torch.save(state, path) if suffix == "pth" else save_file(state, path)
            del state
            yield _measure(path, tensors, numel, megabytes, limits)
            path.unlink()


@click.command()
@click.option("--runs", default=9, show_default=True, help="Most loads per method; the table shows the median.")
@click.option("--seconds", default=8.0, show_default=True, help="Seconds per file after which no round is started.")
@click.option("--clock", type=click.Choice(tuple(_CLOCKS)), default="wall", show_default=True, help="What is measured.")
@click.option("--size", "sizes", type=(int, float), multiple=True, help="Tensors and megabytes; several times.")
def main(*, runs: int, seconds: float, clock: str, sizes: Sequence[tuple[int, float]]) -> None:
    """Measure loads of cached files in a warm process."""
    limits = _Limits(runs=runs, cell_seconds=seconds, clock=_CLOCKS[clock])
    with temporary_folder() as folder:
        rows = list(_rows(Path(folder), sizes or SIZES, limits))
    table = Table("file", "sluice, ms", "on meta, ms", "copied, ms", "assigned, ms", "ratios", "goal", "kept")
    for row in rows:
        milliseconds = [f"{1e3 * value:.2f}" for value in (*row.ours, *row.others.values())]
        ratios = " and ".join(f"{ratio:.2f}" for ratio in row.ratios)
        goal = "< 1" if row.megabytes >= _LARGE_MEGABYTES else "1.2"
        table.add_row(row.what, *milliseconds, ratios, goal, "yes" if row.kept else "no")
    console_for_tables().print(table)
    if not all(row.kept for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
