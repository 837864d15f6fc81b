"""``python -m bench.shared``: processes of one host that need the same weights, which some of them hold already.

The file is fp32 and the model bf16. Processes start at once; each has an empty model before the clock starts, then
loads, then reads every page. Proportional set sizes are read when all have done so: each shared page counts once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import safetensors.torch
import torch
from torch import multiprocessing, nn

import sluice
from bench._common import options, run_alone, show, working_folder
from sluice.benchmark.gpt2 import gpt2, random_state_dict
from sluice.benchmark.machine import make_warm
from sluice.benchmark.process import run_tasks
from sluice.benchmark.records import BenchTask, Outcome, Work
from sluice.benchmark.results import TableSection

__all__ = ["attaching", "inheriting", "main"]

_DTYPE, _LARGE, _SMALL = torch.bfloat16, "fp32.safetensors", "bf16.safetensors"

_METHODS: dict[str, Callable[[nn.Module, Path], object]] = {
    'sluice.load_into, place="shared"': lambda model, folder: sluice.load_into(
        model, folder / _LARGE, dtype=_DTYPE, place="shared"
    ),
    "sluice.load_into": lambda model, folder: sluice.load_into(model, folder / _LARGE, dtype=_DTYPE),
    "load_file of a bf16 file": lambda model, folder: model.load_state_dict(
        safetensors.torch.load_file(folder / _SMALL), assign=True
    ),
    "torch.load(mmap=True) of a bf16 file": lambda model, folder: model.load_state_dict(
        torch.load(folder / "bf16.pth", mmap=True), assign=True
    ),
}


def _empty(size: str) -> nn.Module:
    with sluice.empty_init():
        return gpt2(size)


def _touch(model: nn.Module) -> float:
    """Read a byte of every page of the weights, and return the seconds."""
    begin = time.perf_counter()
    for parameter in model.parameters():
        parameter.detach().view(torch.uint8).flatten()[::4096].sum()
    return time.perf_counter() - begin


def _own_bytes() -> int:
    """Return the proportional set size of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def attaching(method: str, size: str, folder: str) -> Work:
    """Load once, as one of several processes; see ``BenchTask``."""
    before = _own_bytes()
    yield
    model = _empty(size)
    yield
    begin = time.perf_counter()
    _METHODS[method](model, Path(folder))
    seconds = time.perf_counter() - begin
    touched = _touch(model)
    yield
    return {"load": seconds, "touch": touched, "added": _own_bytes() - before}


def _child(model: nn.Module, begin: float, results: Any, barrier: Any) -> None:
    seconds = time.time() - begin
    touched = _touch(model)
    barrier.wait()
    results.put((seconds, touched, _own_bytes()))
    barrier.wait()


def inheriting(start: str, size: str, folder: str, count: int) -> Work:
    """Load in this process, and give the model to others: by fork, or by ``torch.multiprocessing``."""
    context: Any = multiprocessing.get_context(start)
    yield
    model = _empty(size)
    yield
    sluice.load_into(model, Path(folder, _LARGE), dtype=_DTYPE)
    if start == "spawn":
        model.share_memory()
    results, barrier = context.SimpleQueue(), context.Barrier(count)
    begin = time.time()
    children = [context.Process(target=_child, args=(model, begin, results, barrier)) for _ in range(count)]
    for child in children:
        child.start()
    found = [results.get() for _ in children]
    for child in children:
        child.join()
    yield
    columns = [statistics.median(column) for column in zip(*found, strict=True)]
    return {"load": columns[0], "touch": columns[1], "added": columns[2]}


@contextmanager
def _copies() -> Iterator[None]:
    """Keep the copies of this benchmark apart from others, in shared memory."""
    folder = Path(f"/dev/shm/sluice-bench-{os.getpid()}")
    os.environ["SLUICE_SHARED_DIR"] = str(folder)
    try:
        yield
    finally:
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        if folder.is_dir():
            folder.rmdir()


def _cells(outcomes: list[Outcome]) -> tuple[str, str, str]:
    for outcome in outcomes:
        if outcome.status != "ok":
            raise click.ClickException(str(outcome.reason))
    load, touch, added = (
        statistics.median(each.facts[name] for each in outcomes) for name in ("load", "touch", "added")
    )
    return f"{load * 1000:.0f}", f"{touch * 1000:.0f}", f"{added / 2**20:.0f}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options(size="large", runs=5)
@click.option("--processes", type=click.IntRange(1), default=4, show_default=True, help="Processes at once.")
def main(size: str, runs: int, directory: Path | None, out: Path, processes: int) -> None:
    """Compare ways in which several processes of a host get the same weights."""
    with working_folder(directory) as folder, _copies():
        state = random_state_dict(size, torch.float32)
        safetensors.torch.save_file(state, folder / _LARGE)
        small = {name: tensor.to(_DTYPE) for name, tensor in state.items()}
        safetensors.torch.save_file(small, folder / _SMALL)
        torch.save(small, folder / "bf16.pth")
        del state, small
        for name in (_LARGE, _SMALL, "bf16.pth"):
            make_warm(folder / name)
        rows = []
        for count in sorted({1, processes}):
            for method in _METHODS:
                arguments = {"method": method, "size": size, "folder": str(folder)}
                task = BenchTask(work="bench.shared:attaching", arguments=arguments)
                outcomes = [outcome for _ in range(runs) for outcome in run_tasks([task] * count)]
                # The first of all builds the copy; the others are later processes.
                rows.append((method, str(count), *_cells(outcomes[1:] if runs > 1 else outcomes)))
        for name, start in {"fork of a loaded process": "fork", "torch.multiprocessing, spawn": "spawn"}.items():
            task_arguments = {"start": start, "size": size, "folder": str(folder), "count": processes}
            outcomes = [run_alone("bench.shared:inheriting", task_arguments) for _ in range(runs)]
            rows.append((name, str(processes), *_cells(outcomes)))
    headings = ("method", "processes", "load, ms", "every page, ms", "PSS added by each, MiB")
    section = TableSection(title="One model in several processes", headings=headings, rows=tuple(rows))
    show(out, "shared", ("torch", "safetensors"), [section])


if __name__ == "__main__":
    main()
