"""``python -m bench.cached``: loads of a file that is partly in the page cache, and several loads at once.

Every share of cached pages is loaded all direct (``page_cache="bypass"``), all buffered (``"keep"``) and as sluice
chooses (``"auto"``), one after the other, with the same pages cached before each. Then several processes load one file
that is not cached, at the same moment. The command fails if a goal is missed.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

import sluice
from sluice.benchmark import machine as _machine
from sluice.benchmark.cache import cached_share, make_cold, make_warm
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.results import show_document
from sluice.benchmark.table import console_for_tables

__all__ = ["cache_pieces", "goals_missed", "main"]

#: Ways to load, by their names in the table.
WAYS = {"all direct": "bypass", "all buffered": "keep", "sluice": "auto"}

#: Bytes of one scattered piece, and of one tensor.
_PIECE_BYTES = 64 << 10
_TENSOR_BYTES = 16 << 20

#: Largest permitted ratio of sluice to the better of the other two.
_MOST_RATIO = 1.15

#: Largest permitted ratio of the bytes fetched from the disk to those of the file, for several processes at once.
_MOST_FETCHED = 1.3

_ROW = dict[str, Any]


def cache_pieces(path: Path, percent: int, layout: str) -> float:
    """Leave a share of a file in the page cache, at its start or scattered; return the share that is cached."""
    make_cold(path)
    size = path.stat().st_size
    pieces = list(range(0, size, _PIECE_BYTES))
    if percent == 100:
        make_warm(path)
        return cached_share(path)
    if layout == "scattered":
        random.Random(percent).shuffle(pieces)
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    try:
        with ThreadPoolExecutor(16) as pool:
            wanted = pieces[: len(pieces) * percent // 100]
            list(pool.map(lambda offset: len(os.pread(descriptor, _PIECE_BYTES, offset)), wanted))
    finally:
        os.close(descriptor)
    return cached_share(path)


def _fetched() -> int:
    """Return the bytes that this process has fetched from disks."""
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _claim(nbytes: int) -> None:
    """Touch memory and free it: the host of a virtual machine takes back memory that its guest does not use."""
    room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    for offset in range(0, nbytes, mmap.PAGESIZE):
        room[offset] = 1
    room.close()


def _load(path: Path, page_cache: str) -> tuple[float, int, str]:
    """Load once; return seconds, bytes fetched, and the report's sentences on the page cache."""
    gc.collect()
    _claim(path.stat().st_size)
    before, started = _fetched(), time.perf_counter()
    with sluice.open(path) as checkpoint:
        names = {name: tensor.shape for name, tensor in checkpoint.items()}
    with torch.device("meta"):
        model = torch.nn.Module()
        for name, shape in names.items():
            model.register_parameter(name, torch.nn.Parameter(torch.empty(shape)))
    report = sluice.load_into(model, path, page_cache=page_cache)  # type: ignore[arg-type]
    seconds = time.perf_counter() - started
    return seconds, _fetched() - before, "; ".join(note for note in report.notes if "cache" in note)


def _shares(path: Path, shares: Sequence[int], layouts: Sequence[str], runs: int) -> Iterator[_ROW]:
    _load(path, "auto")  # imports, and memory that the host has to provide
    for layout in layouts:
        for percent in shares:
            if percent in {0, 100} and layout != layouts[0]:
                continue  # the same as before
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            cached = 0.0
            for run in range(runs):
                ways = list(WAYS)
                for way in ways[run % len(ways) :] + ways[: run % len(ways)]:
                    cached = cache_pieces(path, percent, layout)
                    seconds[way].append(_load(path, WAYS[way])[0])
            yield {"layout": layout, "percent": percent, "cached": cached, "seconds": seconds}


def _at_once(path: Path, processes: int, page_cache: str) -> _ROW:
    """Load a cold file in several processes that start together."""
    command = [sys.executable, "-m", "bench.cached", "--child", page_cache, "--file", str(path)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()  # it is ready
    make_cold(path)
    started = time.perf_counter()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = []
    for child in children:
        assert child.stdout is not None
        answers.append(json.loads(child.stdout.readline()))
    seconds = time.perf_counter() - started
    for child in children:
        child.communicate()
    return {
        "seconds": seconds,
        "fetched": sum(fetched for _, fetched, _ in answers) / path.stat().st_size,
        "notes": sorted({notes for _, _, notes in answers}),
    }


def _child(path: Path, page_cache: str) -> None:
    """Load once when told to, and print what ``_load`` returns."""
    small = path.with_name(f"small-{os.getpid()}.safetensors")
    save_file({"w": torch.ones(3)}, small)
    _load(small, page_cache)  # imports
    small.unlink()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(_load(path, page_cache)), flush=True)


def _together(path: Path, counts: Sequence[int], runs: int) -> Iterator[_ROW]:
    for processes in counts:
        done: dict[str, list[_ROW]] = {way: [] for way in WAYS}
        for run in range(runs):
            ways = list(WAYS)
            for way in ways[run % len(ways) :] + ways[: run % len(ways)]:
                done[way].append(_at_once(path, processes, WAYS[way]))
        yield {"processes": processes, "runs": done}


def _ratio(seconds: dict[str, float]) -> float:
    return seconds["sluice"] / min(seconds["all direct"], seconds["all buffered"])


def _medians(runs: dict[str, list[float]]) -> dict[str, float]:
    return {way: statistics.median(each) for way, each in runs.items()}


def _together_medians(row: _ROW, field: str) -> dict[str, float]:
    return _medians({way: [run[field] for run in each] for way, each in row["runs"].items()})


def goals_missed(shares: Sequence[_ROW], together: Sequence[_ROW]) -> list[str]:
    """Return one sentence for each goal that was missed."""
    missed = [
        f"{row['percent']} % cached, {row['layout']}: {ratio:.2f} times the better method"
        for row in shares
        if (ratio := _ratio(_medians(row["seconds"]))) > _MOST_RATIO
    ]
    for row in together:
        fetched = _together_medians(row, "fetched")["sluice"]
        if fetched > _MOST_FETCHED:
            missed.append(f"{row['processes']} processes fetched {fetched:.2f} times the file")
        if (ratio := _ratio(_together_medians(row, "seconds"))) > _MOST_RATIO:
            missed.append(f"{row['processes']} processes: {ratio:.2f} times the better method")
    return missed


def _tables(shares: Sequence[_ROW], together: Sequence[_ROW]) -> list[str]:
    lines = []
    if shares:
        lines += ["| cached | all direct | all buffered | sluice | ratio |", "|---|---:|---:|---:|---:|"]
    lines += map(_share_line, shares)
    if together:
        lines += ["", "| processes | all direct | all buffered | sluice | ratio |", "|---|---:|---:|---:|---:|"]
    return [*lines, *map(_together_line, together)]


def _share_line(row: _ROW) -> str:
    found = _medians(row["seconds"])
    figures = " | ".join(f"{found[way]:.2f} s" for way in WAYS)
    return f"| {row['percent']} %, {row['layout']} | {figures} | {_ratio(found):.2f} |"


def _together_line(row: _ROW) -> str:
    found, fetched = (_together_medians(row, field) for field in ("seconds", "fetched"))
    figures = " | ".join(f"{found[way]:.2f} s, {fetched[way]:.2f} of the file" for way in WAYS)
    return f"| {row['processes']} | {figures} | {_ratio(found):.2f} |"


def _printed(rows: Iterator[_ROW], line: Callable[[_ROW], str]) -> list[_ROW]:
    """Return all rows; print each as it is measured, so that an interrupt loses only the one under way."""
    done = []
    for row in rows:
        click.echo(line(row))
        done.append(row)
    return done


def _numbers(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",") if number)
    except ValueError:
        raise click.BadParameter("expected numbers separated by commas") from None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--mib", type=click.IntRange(64), default=1024, show_default=True, help="Size of the file.")
@click.option("--shares", callback=_numbers, default="0,10,25,50,75,100", show_default=True, help="Percent cached.")
@click.option("--layout", "layouts", type=click.Choice(["contiguous", "scattered"]), multiple=True, help="Only this.")
@click.option("--processes", callback=_numbers, default="1,2,4", show_default=True, help="Processes at once.")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Repetitions; tables show medians.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where the file goes; it is removed.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
@click.option("--child", hidden=True, type=click.Choice(list(WAYS.values())))
@click.option("--file", hidden=True, type=click.Path(path_type=Path))
def main(
    *,
    mib: int,
    shares: tuple[int, ...],
    layouts: tuple[str, ...],
    processes: tuple[int, ...],
    runs: int,
    directory: Path | None,
    out: Path,
    child: str | None,
    file: Path | None,
) -> None:
    """Compare direct, buffered and chosen reads of a partly cached file, and of one file by several processes."""
    if child is not None:
        assert file is not None
        _child(file, child)
        return
    console = console_for_tables()
    with nullcontext(directory) if directory else temporary_folder() as folder:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "cached.safetensors"
        try:
            count = (mib << 20) // _TENSOR_BYTES
            save_file({f"t{i:03}": torch.full((_TENSOR_BYTES // 4,), float(i)) for i in range(count)}, path)
            by_share = _printed(_shares(path, shares, layouts or ("contiguous", "scattered"), runs), _share_line)
            together = _printed(_together(path, processes, runs), _together_line)
        finally:
            path.unlink(missing_ok=True)
        described = _machine.describe(folder, ("torch", "sluice", "safetensors"))
    numbers = f"--mib {mib} --shares {','.join(map(str, shares))} --processes {','.join(map(str, processes))}"
    command = " ".join(["python -m bench.cached", numbers, f"--runs {runs}", *(f"--layout {each}" for each in layouts)])
    record = {"command": command, "machine": described, "shares": by_share, "together": together}
    show_document(console, out, "cached", record, _tables(by_share, together))
    missed = goals_missed(by_share, together)
    for sentence in missed:
        console.print(f"missed: {sentence}", highlight=False)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
