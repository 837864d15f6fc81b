"""``python -m bench.everywhere``: loads from every kind of file system and storage, compared with raw reads there.

Each load has a new process. Files are dropped from the page cache before, imports are not counted, and every value is
compared after it. Raw reads fill memory of the process too: direct and buffered reads, and copies of the mapped file.
The command fails if a value is wrong, a load fails, or sluice takes longer than the goal.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

from bench._pattern import FILES, write_files
from bench._reads import METHODS, Job, Outcome, measure
from bench.places import PLACES, Place, Spot, Unavailable, own_mounts
from sluice._units import parse_bytes
from sluice.benchmark import machine as _machine
from sluice.benchmark.cache import make_cold
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.results import show_document
from sluice.benchmark.table import console_for_tables
from sluice.measuring import memory_limit_refusal

__all__ = ["GOAL", "Row", "main", "table"]

#: Most time of a load, as a multiple of the fastest raw read.
GOAL = 1.15

_RIVAL = "rival"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One file at one place."""

    place: str
    #: Name of the file; empty if the place was skipped.
    file: str = ""
    #: Why it was skipped; empty if it was not.
    skipped: str = ""
    #: Seconds of each run by method.
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    #: Texts of failures by method.
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Seconds of sluice as a multiple of those of the fastest raw read; None if there are none."""
        medians = {name: median(runs) for name, runs in self.seconds.items() if runs}
        raw = [seconds for name, seconds in medians.items() if name in METHODS]
        return medians["sluice"] / min(raw) if raw and "sluice" in medians else None

    @property
    def failed(self) -> bool:
        """Whether sluice failed or missed the goal."""
        return not self.skipped and ("sluice" in self.problems or self.ratio is None or self.ratio > GOAL)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"| place | file | {' | '.join(f'{name} s' for name in METHODS)} | sluice s | / best | remark |",
        "|---|---|" + "---:|" * (len(METHODS) + 2) + "---|",
    ]
    for row in rows:
        cells = [f"{median(row.seconds[name]):.2f}" if row.seconds.get(name) else "-" for name in (*METHODS, "sluice")]
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        remarks = [f"skipped: {row.skipped}"] if row.skipped else [f"{n}: {text}" for n, text in row.problems.items()]
        if row.ratio is not None and row.ratio > GOAL:
            remarks.append("above the goal")
        file = Path(row.file).suffix
        lines.append(f"| {row.place} | {file} | {' | '.join(cells)} | {ratio} | {'; '.join(remarks)} |")
    return lines


def _fill(folder: Path, nbytes: int, *, rival: bool) -> None:
    """Write the files in a process of its own: their bytes stay out of the memory of this one."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["bench._reads"])
    process = context.Process(target=write_files, args=(folder, nbytes))
    process.start()
    process.join()
    if process.exitcode:
        raise click.ClickException(f"the files could not be written to {folder}")
    if rival:
        (folder / _RIVAL).write_bytes(os.urandom(1 << 20) * (nbytes >> 20))
    os.sync()


def _row(name: str, place: Place, spot: Spot, file: str, nbytes: int, runs: int) -> Row:
    path = spot.folder / file
    job = Job(
        path=path,
        nbytes=nbytes,
        cores=len(os.sched_getaffinity(0)),
        has_disk=place.has_disk,
        groups=spot.groups,
        limited=place.limited,
        rival=spot.folder / _RIVAL if place.rival else None,
    )
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    problems: dict[str, str] = {}
    methods = [*METHODS, "sluice"]
    for run in range(runs):
        for method in methods[run % len(methods) :] + methods[: run % len(methods)]:
            if method in problems:
                continue
            if place.has_disk and not make_cold(path):
                problems[method] = "the file stays cached"
                continue
            outcome: Outcome = measure(method, job, place.processes)
            if outcome.problem:
                problems[method] = outcome.problem
                seconds.pop(method, None)
            else:
                seconds[method].append(outcome.seconds)
    return Row(place=name, file=file, seconds=dict(seconds), problems=problems)


def _rows(name: str, nbytes: int, runs: int, files: Sequence[str], parent: Path) -> list[Row]:
    place = PLACES[name]
    if place.limited and (refusal := memory_limit_refusal()):
        return [Row(place=name, skipped=refusal)]
    with tempfile.TemporaryDirectory(dir=parent) as work:
        fill = partial(_fill, nbytes=nbytes, rival=place.rival)
        try:
            with place.set_up(Path(work), fill, len(FILES) * nbytes) as spot:
                return [_row(name, place, spot, file, nbytes, runs) for file in files]
        except Unavailable as reason:
            return [Row(place=name, skipped=str(reason))]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--place", "places", type=click.Choice(list(PLACES)), multiple=True, help="Only this one; repeatable.")
@click.option("--file", "files", type=click.Choice(FILES), multiple=True, help="Only this one.")
@click.option("--size", default="1GiB", show_default=True, help="Size of each file.")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Repetitions; tables show medians.")
@click.option("--directory", type=click.Path(path_type=Path), help="Directory for files and images.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
def main(
    places: tuple[str, ...], files: tuple[str, ...], size: str, runs: int, directory: Path | None, out: Path
) -> None:
    """Load checkpoints from every place, and read them raw, interleaved, each in a new process."""
    console: Console = console_for_tables()
    own_mounts()
    rows: list[Row] = []
    with temporary_folder(directory) as folder:
        machine = _machine.describe(folder, ("torch", "sluice", "safetensors"))
        for name in places or PLACES:
            measured = _rows(name, parse_bytes(size), runs, files or FILES, folder)
            for line in table(measured)[2:]:
                console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
            rows += measured
    chosen = "".join([f" --place {name!r}" for name in places] + [f" --file {name}" for name in files])
    command = f"python -m bench.everywhere --size {size} --runs {runs}{chosen}"
    document: dict[str, Any] = {"command": command, "machine": machine, "rows": [asdict(row) for row in rows]}
    show_document(console, out, "everywhere", document, table(rows))
    if any(row.failed for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
