"""``python -m bench.small``: loads of cached files in a warm process, from 8 small tensors to 1 GB.

One process loads every file with each method in turn, so that what is measured is the call and not the imports. The
module is built before the clock starts: with real parameters for methods that copy, on meta for those that assign. The
modules are nested, with at most 32 children each, because ``load_state_dict`` compares every name with every child.

The goal: at most 1.2 times the fastest other method, and from 50 MB on faster than all. The command fails if it is
missed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

import sluice
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.table import console_for_tables

__all__ = ["Row", "main"]

#: Numbers of tensors and megabytes of a file.
SIZES = ((8, 0.1), (100, 1.0), (300, 50.0), (300, 1000.0), (2000, 10.0), (10_000, 40.0), (100_000, 100.0))

#: A file of this size or more must load faster than with any other method.
_LARGE_MEGABYTES = 50

_FORMATS = ("pth", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians of one file, in seconds."""

    #: Description of the file.
    what: str
    #: Megabytes of its tensors.
    megabytes: float
    #: Seconds of sluice into real parameters and into a module on meta.
    ours: tuple[float, float]
    #: Seconds of each other method.
    others: dict[str, float]

    @property
    def ratio(self) -> float:
        """The faster of the two loads of sluice, relative to the fastest other method."""
        return min(self.ours) / min(self.others.values())

    @property
    def kept(self) -> bool:
        """Whether the goal is reached."""
        return self.ratio < 1 if self.megabytes >= _LARGE_MEGABYTES else self.ratio <= 1.2


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


def _measure(path: Path, tensors: int, numel: int, megabytes: float, runs: int) -> Row:
    methods = {name: (device, "other", load) for name, (device, load) in _others(path).items()}
    for device in ("cpu", "meta"):
        methods[f"sluice, {device}"] = (device, "sluice", lambda module: sluice.load_into(module, path))
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for run in range(runs + 1):
        for name, (device, _, load) in methods.items():
            with torch.device(device):
                module = module_of(tensors, numel)
            gc.collect()
            start = time.perf_counter()
            load(module)
            if run:  # the first load is the warm-up
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return Row(
        what=f"{tensors} tensors, {megabytes:g} MB, {path.suffix}",
        megabytes=megabytes,
        ours=(medians["sluice, cpu"], medians["sluice, meta"]),
        others={name: medians[name] for name, (_, whose, _) in methods.items() if whose == "other"},
    )


def _rows(folder: Path, sizes: Sequence[tuple[int, float]], runs: int) -> list[Row]:
    rows = []
    for tensors, megabytes in sizes:
        numel = max(1, round(megabytes * 1e6 / 4 / tensors))
        for suffix in _FORMATS:
            path = folder / f"file.{suffix}"
            state = {name: torch.randn(numel) for name in module_of(tensors, numel).state_dict()}
            torch.save(state, path) if suffix == "pth" else save_file(state, path)
            del state
            rows.append(_measure(path, tensors, numel, megabytes, runs))
            path.unlink()
    return rows


@click.command()
@click.option("--runs", default=9, show_default=True, help="Loads per method; the table shows the median.")
@click.option("--size", "sizes", type=(int, float), multiple=True, help="Tensors and megabytes; several times.")
def main(*, runs: int, sizes: Sequence[tuple[int, float]]) -> None:
    """Measure loads of cached files in a warm process."""
    with temporary_folder() as folder:
        rows = _rows(Path(folder), sizes or SIZES, runs)
    table = Table("file", "sluice, ms", "on meta, ms", "copied, ms", "assigned, ms", "ratio", "goal", "kept")
    for row in rows:
        milliseconds = [f"{1e3 * seconds:.2f}" for seconds in (*row.ours, *row.others.values())]
        goal = "< 1" if row.megabytes >= _LARGE_MEGABYTES else "1.2"
        table.add_row(row.what, *milliseconds, f"{row.ratio:.2f}", goal, "yes" if row.kept else "no")
    console_for_tables().print(table)
    if not all(row.kept for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
