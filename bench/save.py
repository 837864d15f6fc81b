"""``python -m bench.save``: how fast and how lean sluice saves GPT-2, beside torch.save, safetensors and a raw write.

Every save has a process of its own and writes a new file of the same weights. The clock stops when the file and its
name are on the disk: what does not sync by itself is synced by the bench, and that is timed as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import click
import safetensors.torch
import torch
from rich.console import Console

import sluice
from sluice._measure import PeakMeter
from sluice.benchmark import _machine
from sluice.benchmark._folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, build

__all__ = ["METHODS", "main"]

_PACKAGES = ("torch", "sluice", "safetensors")

#: Bytes of one write of the raw method.
_PIECE_BYTES = 16 << 20

_State = dict[str, torch.Tensor]


def _synced(path: Path) -> None:
    """Put a file and its name on the disk, as a save that lasts has to."""
    for each in (path, path.parent):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _raw(state: _State, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for tensor in state.values():
        view = memoryview(tensor.flatten().view(torch.uint8).numpy().data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            while piece:
                piece = piece[os.write(descriptor, piece) :]
    os.close(descriptor)
    _synced(path)


def _torch(state: _State, path: Path) -> None:
    torch.save(state, path)
    _synced(path)


def _safetensors(state: _State, path: Path) -> None:
    safetensors.torch.save_file(state, path)
    _synced(path)


def _sluice(state: _State, path: Path) -> None:
    sluice.save(state, path)


def _sluice_bf16(state: _State, path: Path) -> None:
    sluice.save(state, path, dtype=torch.bfloat16)


def _torch_bf16(state: _State, path: Path) -> None:
    torch.save({name: tensor.to(torch.bfloat16) for name, tensor in state.items()}, path)
    _synced(path)


#: What is compared: the function and the suffix that it writes.
METHODS: dict[str, tuple[Callable[[_State, Path], None], str]] = {
    "raw write": (_raw, ".raw"),
    "torch.save": (_torch, ".pth"),
    "sluice.save .pth": (_sluice, ".pth"),
    "safetensors.save_file": (_safetensors, ".safetensors"),
    "sluice.save .safetensors": (_sluice, ".safetensors"),
    "torch.save of .to(bf16)": (_torch_bf16, ".pth"),
    "sluice.save .pth, dtype=bf16": (_sluice_bf16, ".pth"),
}


def _child(method: str, size: str, path: Path) -> None:
    """Save once and print the seconds and the peak."""
    save, suffix = METHODS[method]
    with torch.no_grad():
        state = {
            name: tensor.normal_() for name, tensor in build(size).state_dict().items() if tensor.is_floating_point()
        }
    save({"warm": torch.ones(3)}, path.with_name(f"warm{suffix}"))  # imports, and what is made on first use
    path.with_name(f"warm{suffix}").unlink()
    os.sync()
    with PeakMeter() as meter:
        started = time.perf_counter()
        save(state, path)
        seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "peak": meter.peaks.total_bytes, "nbytes": path.stat().st_size}))


def _run(method: str, size: str, folder: Path) -> dict[str, Any]:
    path = folder / f"model{METHODS[method][1]}"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.save", "--child", method, "--size", size, "--directory", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    path.unlink(missing_ok=True)
    if done.returncode:
        raise click.ClickException(f"{method} failed: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _table(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = [
        "| method | file GB | seconds | from | to | / raw write | peak MiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    raw = median(run["seconds"] for run in runs["raw write"]) if "raw write" in runs else None
    for method, each in runs.items():
        seconds = [run["seconds"] for run in each]
        ratio = f"{median(seconds) / raw:.2f}" if raw else "-"
        peak = max(run["peak"] for run in each) / 2**20
        figures = f"{median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {ratio} | {peak:.0f}"
        lines.append(f"| {method} | {each[0]['nbytes'] / 1e9:.2f} | {figures} |")
    return lines


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="medium", show_default=True, help="Size of the model.")
@click.option("--method", "methods", type=click.Choice(list(METHODS)), multiple=True, help="Only this; repeatable.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Repetitions; tables show medians.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where the files go; they are removed.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
@click.option("--child", hidden=True, type=click.Choice(list(METHODS)))
def main(size: str, methods: tuple[str, ...], runs: int, directory: Path | None, out: Path, child: str | None) -> None:
    """Compare saves: seconds until the file is on the disk, and peak memory; each in a fresh process, interleaved."""
    if child is not None:
        assert directory is not None
        _child(child, size, directory / f"model{METHODS[child][1]}")
        return
    console = Console()
    chosen = methods or tuple(METHODS)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    done: dict[str, list[dict[str, Any]]] = {method: [] for method in chosen}
    with nullcontext(directory) if directory else temporary_folder() as folder:
        machine = _machine.describe(folder, _PACKAGES)
        for _ in range(runs):
            for method in chosen:
                done[method].append(_run(method, size, folder))
                console.print(f"{method}: {done[method][-1]['seconds']:.2f} s", highlight=False)
    lines = [
        f"`python -m bench.save --size {size} --runs {runs}`",
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
        "",
        *_table(done),
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "save.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (out / "save.json").write_text(json.dumps({"machine": machine, "runs": done}, indent=2) + "\n", encoding="utf-8")
    console.print("\n".join(lines), highlight=False, markup=False)


if __name__ == "__main__":
    main()
