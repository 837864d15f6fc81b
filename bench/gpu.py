"""``python3 -m bench.gpu``: the tutorial's methods, sluice and its peers on a CUDA device, with raw limits.

The command is bounded in time: the most important runs come first, and runs that do not fit get a row with the reason.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from rich.console import Console

from bench import _peers as _registers_methods
from bench import _puzzle as puzzles
from bench._common import refuse_wrong_weights, run_alone, show_document
from bench._puzzle import Puzzle
from sluice._units import format_bytes
from sluice.benchmark import machine as _machine
from sluice.benchmark.gpt2 import SIZES, random_state_dict, write_checkpoint
from sluice.benchmark.machine import make_cold, temporary_folder
from sluice.benchmark.methods import STRATEGIES, final_bytes
from sluice.benchmark.records import MethodRun, Outcome, Precision, Scenario, Work
from sluice.benchmark.results import TableSection, as_document, console_for_tables, section_of, write_report
from sluice.benchmark.runner import run_with_progress

__all__ = ["main", "pinned_copy", "scenarios_for"]

assert _registers_methods

_DEVICE = "cuda"

_PACKAGES = ("torch", "sluice", "safetensors", "runai-model-streamer", "fastsafetensors", "instanttensor")

_RAW = ("raw-direct", "raw-buffered")
_SAFETENSORS_PEERS = ("safetensors-load-model", "fastsafetensors", "runai-streamer", "instanttensor")
_OURS = "sluice-load-into"

#: Fraction of the time reserved for the puzzle, which runs last because it needs the disk.
_SHARE_OF_PUZZLE = 0.35

#: Seconds reserved for tables and the page.
_LAST_SECONDS = 10.0

#: Longest time of a load.
_LOAD_SECONDS = 60.0

#: Needed disk space in files: three checkpoints of the same weights, and a margin.
_DISK_IN_FILES = 3.1

#: Number of matrices of the puzzle, 256 MiB each, that are generated at once.
_PUZZLE_THREADS = 8

#: Size of one copy from page-locked memory, sluice's default staging, and number of attempts.
_COPY_BYTES, _COPIES = 64 << 20, 4


def scenarios_for(size: str, directory: Path) -> list[Scenario]:
    """Return the scenarios of GPT-2 in this size, most important first."""
    pth, safetensors, folder = directory / "model.pth", directory / "model.safetensors", directory / "parameters"
    tutorial = {method.name: pth if ".pth" in method.reads else folder for method in STRATEGIES}
    torchs_and_ours = dict.fromkeys(("torch-load", "torch-mmap", _OURS), pth)
    peers = dict.fromkeys((*_SAFETENSORS_PEERS, _OURS), safetensors)
    return [
        _scenario(".pth, fp32", size, "float32", {**dict.fromkeys(_RAW, pth), **torchs_and_ours}),
        _scenario("the tutorial's methods, fp32", size, "float32", tutorial),
        _scenario(".pth, fp32 → bf16", size, "bfloat16", torchs_and_ours),
        _scenario(".safetensors, fp32", size, "float32", peers),
        _scenario(".safetensors, fp32 → bf16", size, "bfloat16", peers),
    ]


def _scenario(title: str, size: str, dtype: Precision, checkpoints: dict[str, Path]) -> Scenario:
    return Scenario(
        title=f"GPT-2 {size}, {title}",
        model=size,
        dtype=dtype,
        device=_DEVICE,
        states=("cold", "warm"),
        checkpoints=checkpoints,
        final_bytes=final_bytes(size, torch.bfloat16 if dtype == "bfloat16" else torch.float32),
    )


def pinned_copy(nbytes: int) -> Work:
    """Copy from page-locked memory to the device: the work of a process. Returns the seconds of the fastest attempt."""
    staging = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=_DEVICE)
    yield
    yield
    tries = []
    for _ in range(_COPIES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for piece in torch.split(target, _COPY_BYTES):
            piece.copy_(staging[: len(piece)], non_blocking=True)
        torch.cuda.synchronize()
        tries.append(time.perf_counter() - begin)
    yield
    return {"seconds": min(tries)}


def _make_checkpoints(console: Console, size: str, folder: Path) -> float:
    """Write the three checkpoints; return the speed of generating and writing the first, in bytes per second."""
    nbytes = final_bytes(size, torch.float32)
    if shutil.disk_usage(folder).free < _DISK_IN_FILES * nbytes:
        raise click.ClickException(
            f"three checkpoints of GPT-2 {size} take {format_bytes(int(_DISK_IN_FILES * nbytes))} of disk: "
            "choose a smaller --size or another --directory"
        )
    with console.status("making the checkpoints"):
        state = random_state_dict(size, torch.float32)
        begin = time.perf_counter()
        write_checkpoint(state, folder / "model.pth")
        make_cold(folder / "model.pth")
        seconds = time.perf_counter() - begin
        write_checkpoint(state, folder / "model.safetensors")
        write_checkpoint(state, folder / "parameters")
    return nbytes / seconds


def _solve_puzzle(
    console: Console, folder: Path, *, seconds: float, bytes_per_second: float
) -> tuple[Puzzle | None, Outcome | None, str]:
    """Write the largest puzzle that fits disk, device and time, and load it; without an outcome, return the reason."""
    begin = time.monotonic()
    size = puzzles.choose(
        disk_bytes=shutil.disk_usage(folder).free,
        device_bytes=torch.cuda.mem_get_info()[0],
        seconds=seconds,
        bytes_per_second=bytes_per_second,
    )
    if size is None:
        return None, None, f"not tried: disk, device or the {seconds:.0f} s left allow too little of it"
    path = folder / "puzzle.pth"
    with console.status(f"making the puzzle, {format_bytes(size.file_bytes)}"):
        puzzles.make_file(path, size, threads=min(_PUZZLE_THREADS, len(os.sched_getaffinity(0))))
        if not make_cold(path):
            return size, None, "the file could not be dropped from the page cache"
    arguments = {"path": str(path), "layers": size.layers, "width": size.width, "device": _DEVICE}
    left = max(1.0, seconds - (time.monotonic() - begin))
    return size, run_alone("bench._puzzle:solve", arguments, timeout_seconds=left), ""


def _limits_section(file_bytes: int, pinned: Outcome, runs: Sequence[MethodRun]) -> TableSection:
    """Return the raw limits of the machine for the bytes of the file."""
    outcomes = {"copy from page-locked memory": pinned}
    outcomes |= {f"{run.method}, {run.state}": run.outcome for run in runs if run.method.startswith("raw-")}
    rows = []
    for name, outcome in outcomes.items():
        # The copy is repeated in one process, which returns the fastest.
        seconds = outcome.facts.get("seconds", outcome.seconds)
        good = outcome.status == "ok" and seconds
        speed = f"{file_bytes / seconds / 1e9:.2f}" if good else "-"
        rows.append((name, f"{seconds:.3f}" if good else outcome.reason, speed))
    title = f"Raw limits: the {format_bytes(file_bytes)} of the fp32 file"
    return TableSection(title=title, headings=("what", "seconds", "GB/s"), rows=tuple(rows))


def _puzzle_section(puzzle: Puzzle | None, solved: Outcome | None, reason: str) -> TableSection:
    """Return the result of the puzzle; ``reason`` is why it was not tried."""
    rows = []
    if puzzle is not None:
        rows += [
            ("scale", f"{puzzle.share:.2f} of the full puzzle"),
            ("file, fp32", format_bytes(puzzle.file_bytes)),
            ("model, bf16 (F)", format_bytes(puzzle.final_bytes)),
            ("cap of the device", format_bytes(puzzle.device_limit_bytes)),
        ]
    if solved is None or solved.status != "ok":
        rows.append(("result", reason if solved is None else solved.reason))
    else:
        facts = solved.facts
        rows += [
            ("reserved on the device", format_bytes(facts["device_reserved_bytes"])),
            ("allocated on the device", format_bytes(facts["device_allocated_bytes"])),
            ("growth of the host", format_bytes(solved.total_bytes)),
            ("seconds, cold", f"{solved.seconds:.1f}"),
            ("GB/s", f"{facts['read_bytes'] / solved.seconds / 1e9:.2f}"),
            ("wrong matrices", str(facts["wrong_matrices"])),
            ("computes", "yes" if facts["computes"] else "NO"),
        ]
    return TableSection(title="The puzzle of pytorch issue 75242", headings=("what", "figure"), rows=tuple(rows))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="xl", show_default=True, help="Size of GPT-2.")
@click.option("--minutes", type=click.FloatRange(min=1), default=7.5, show_default=True, help="When to end.")
@click.option("--directory", type=click.Path(path_type=Path), help="For the checkpoints; else the temp folder.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("gpu-out"), show_default=True, help="Results.")
def main(size: str, minutes: float, directory: Path | None, out: Path) -> None:
    """Compare loaders on a CUDA device: memory of device and host, seconds cold and cached."""
    console = console_for_tables()
    if not torch.cuda.is_available():
        click.echo(f"bench.gpu needs a CUDA device, and torch {torch.__version__} finds none here.", err=True)
        raise SystemExit(2)
    end = time.monotonic() + minutes * 60 - _LAST_SECONDS
    nbytes = final_bytes(size, torch.float32)
    with temporary_folder(directory) as folder:
        machine = _machine.describe(folder, _PACKAGES)
        console.print("\n".join(f"{key}: {value}" for key, value in machine.items()), highlight=False)
        speed = _make_checkpoints(console, size, folder)
        pinned = run_alone("bench.gpu:pinned_copy", {"nbytes": nbytes}, timeout_seconds=end - time.monotonic())
        scenarios = scenarios_for(size, folder)
        seconds = end - time.monotonic() - _SHARE_OF_PUZZLE * minutes * 60
        runs = run_with_progress(console, scenarios, repetitions=1, timeout_seconds=_LOAD_SECONDS, end_seconds=seconds)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        left = end - time.monotonic()
        puzzle, solved, reason = _solve_puzzle(console, folder, seconds=left, bytes_per_second=speed)
    of_pth = [run for run in runs if run.scenario == scenarios[0].title]
    command = f"python3 -m bench.gpu --size {size} --minutes {minutes:g}"
    document = as_document(machine=machine, command=command, scenarios=scenarios, runs=runs)
    more = [_limits_section(nbytes, pinned, of_pth), _puzzle_section(puzzle, solved, reason)]
    document["sections"] = [dataclasses.asdict(section) for section in more]
    show_document(out, "gpu", document, [*(section_of(each, runs) for each in scenarios), *more])
    write_report(out / "gpu.html", document, scenarios, runs)
    refuse_wrong_weights(document)


if __name__ == "__main__":
    main()
