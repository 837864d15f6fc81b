"""``python -m bench.everywhere``: loads from every kind of file system and storage, compared with raw reads there.

Each load has a new process. Files are dropped from the page cache before, imports are not counted, and every value is
compared after it. Raw reads fill memory of the process too: direct and buffered reads, and copies of the mapped file.
The command fails if a value is wrong, a load fails, or sluice takes longer than the goal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import click

from bench._common import show
from bench._pattern import FILES
from bench._reads import METHODS, Job, measure
from bench.places import PLACES, Place, Spot, Unavailable, own_mounts
from sluice._units import parse_bytes
from sluice.benchmark.machine import make_cold, temporary_folder
from sluice.benchmark.results import TableSection
from sluice.measuring import memory_limit_refusal

__all__ = ["GOAL", "Row", "main", "section"]

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


def section(rows: Sequence[Row]) -> TableSection:
    """Return the table."""
    seconds = (f"{name} s" for name in (*METHODS, "sluice"))
    return TableSection(
        title="", headings=("place", "file", *seconds, "/ best", "remark"), rows=tuple(map(_cells, rows))
    )


def _cells(row: Row) -> tuple[str, ...]:
    seconds = [f"{median(row.seconds[name]):.2f}" if row.seconds.get(name) else "-" for name in (*METHODS, "sluice")]
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    remarks = [f"skipped: {row.skipped}"] if row.skipped else [f"{n}: {text}" for n, text in row.problems.items()]
    if row.ratio is not None and row.ratio > GOAL:
        remarks.append("above the goal")
    return (row.place, Path(row.file).suffix, *seconds, ratio, "; ".join(remarks))


def _fill(folder: Path, nbytes: int, *, rival: bool) -> None:
    """Write the files in a process of its own: their bytes stay out of the memory of this one."""
    code = "import sys; from pathlib import Path; from bench._pattern import write_files; "
    code += "write_files(Path(sys.argv[1]), int(sys.argv[2]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if subprocess.run([sys.executable, "-c", code, folder, str(nbytes)], check=False, env=environment).returncode:
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
            elapsed, problem = measure(method, job, place.processes)
            if problem:
                problems[method] = problem
                seconds.pop(method, None)
            else:
                seconds[method].append(elapsed)
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
    own_mounts()
    rows: list[Row] = []
    with temporary_folder(directory) as folder:
        for name in places or PLACES:
            measured = _rows(name, parse_bytes(size), runs, files or FILES, folder)
            for row in measured:
                click.echo(" | ".join(_cells(row)))
            rows += measured
    packages = ("torch", "sluice", "safetensors")
    show(out, "everywhere", packages, [section(rows)], rows=[asdict(row) for row in rows])
    if any(row.failed for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
