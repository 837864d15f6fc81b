"""Overhead of ``sluice.measure``: workloads with and without it, interleaved, and the CPU time of its helper."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch

import sluice
from sluice.benchmark import machine as _machine
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, build, make_checkpoint

__all__ = ["Cost", "compare"]

#: Number of additions of the loop, and of products of square matrices of a thousand rows: about a second each.
_ADDITIONS, _PRODUCTS, _ROWS = 20_000_000, 40, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Overhead of measuring one workload; medians over the runs."""

    #: Name of the workload.
    workload: str
    #: Time of the workload alone.
    alone_seconds: float
    #: Time of the workload inside the block.
    measured_seconds: float
    #: Time of entering and leaving the block: the helper starts, and returns its samples.
    ends_seconds: float
    #: CPU time of the helper, its start included, divided by the duration of the block; 1 is one core.
    helper_share: float
    #: Samples per second.
    samples_per_second: float

    @property
    def slowdown(self) -> float:
        """Relative increase of the workload's time; noise can make it negative."""
        return self.measured_seconds / self.alone_seconds - 1

    def row(self) -> str:
        """Return a row of the Markdown table."""
        return (
            f"| {self.workload} | {self.alone_seconds:.2f} s | {self.slowdown:+.1%} | {self.ends_seconds * 1e3:.0f} ms "
            f"| {self.helper_share:.1%} | {self.samples_per_second:.0f} |"
        )


_HEADER = (
    "| workload | alone | with the meter | begin and end | helper's share of a core | samples a second |\n"
    "|---|---:|---:|---:|---:|---:|"
)


def compare(name: str, work: Callable[[], object], *, runs: int, interval_seconds: float, pss: bool = False) -> Cost:
    """Run a workload alternately with and without the meter, so that other load on the machine affects both.

    Args:
        name: Name of the workload.
        work: The workload, equal on every call.
        runs: Number of runs with and without the meter, after one warm-up run.
        interval_seconds: As in ``sluice.measure``.
        pss: As in ``sluice.measure``.
    """
    work()
    alone, measured, ends, shares, rates = [], [], [], [], []
    for _ in range(runs):
        alone.append(_seconds(work))
        before, begin = _children_seconds(), time.perf_counter()
        with sluice.measure(interval_seconds=interval_seconds, pss=pss) as memory:
            inside = _seconds(work)
        whole = time.perf_counter() - begin
        measured.append(inside)
        ends.append(whole - inside)
        shares.append((_children_seconds() - before) / whole)
        rates.append(len(memory.report.timeline) / memory.report.seconds)
    return Cost(
        workload=name,
        alone_seconds=statistics.median(alone),
        measured_seconds=statistics.median(measured),
        ends_seconds=statistics.median(ends),
        helper_share=statistics.median(shares),
        samples_per_second=statistics.median(rates),
    )


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # ended children only
    return used.ru_utime + used.ru_stime


def _add() -> int:
    total = 0
    for number in range(_ADDITIONS):
        total += number
    return total


def _multiply() -> None:
    matrix = torch.ones(_ROWS, _ROWS)
    for _ in range(_PRODUCTS):
        torch.mm(matrix, matrix)


def _loader(path: Path, size: str) -> Callable[[], object]:
    def load() -> None:
        with sluice.empty_init():
            model = build(size)
        sluice.load_into(model, path, page_cache="keep")

    return load


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="medium", show_default=True, help="Of the model to load.")
@click.option("--runs", type=click.IntRange(1), default=9, show_default=True, help="Of each workload, each way.")
@click.option("--interval-ms", type=float, default=1.0, show_default=True, help="Between two samples.")
@click.option("--directory", type=click.Path(path_type=Path), help="For the checkpoint; else the temp folder.")
def main(size: str, runs: int, interval_ms: float, directory: Path | None) -> None:
    """Measure the overhead of sluice.measure for a Python loop, matrix products on all cores, and a load."""
    interval_seconds = interval_ms / 1e3
    with temporary_folder(directory) as folder:
        make_checkpoint(folder / "model.pth", size, torch.float32, "torch")
        load = _loader(folder / "model.pth", size)
        workloads: list[tuple[str, Callable[[], object], bool]] = [
            ("a loop in Python", _add, False),
            (f"products of matrices, {os.cpu_count()} threads", _multiply, False),
            (f"load of GPT-2 {size}, cached", load, False),
            (f"load of GPT-2 {size}, cached, `pss=True`", load, True),
        ]
        click.echo("\n".join(f"- {key}: {value}" for key, value in _machine.describe(folder, ["torch"]).items()))
        click.echo(f"- a sample every {interval_ms:g} ms, medians of {runs} runs\n\n{_HEADER}")
        for name, work, pss in workloads:
            click.echo(compare(name, work, runs=runs, interval_seconds=interval_seconds, pss=pss).row())


if __name__ == "__main__":
    main()
