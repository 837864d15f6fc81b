"""``python -m bench.save``: time and memory to save GPT-2 with sluice, torch.save, safetensors and a raw write.

Every save runs in a process of its own and writes a new file of the same weights. The clock stops when the file and its
name are durable: methods that do not sync are followed by a sync, which is timed as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import safetensors.torch
import torch

import sluice
from sluice.benchmark import machine as _machine
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, random_state_dict
from sluice.benchmark.results import show_document
from sluice.benchmark.table import console_for_tables
from sluice.machine.peaks import PeakMeter

__all__ = ["METHODS", "main"]

_PACKAGES = ("torch", "sluice", "safetensors")

#: Bytes of one write of the raw method.
_PIECE_BYTES = 16 << 20

_State = dict[str, torch.Tensor]


def _synced(path: Path) -> None:
    """Sync a file and its directory, as a durable save must."""
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


def _safetensors_contiguous(state: _State, path: Path) -> None:
    _safetensors({name: tensor.contiguous() for name, tensor in state.items()}, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method of saving."""

    #: Saves a state dict durably.
    save: Callable[[_State, Path], None]
    #: Suffix of the file.
    suffix: str
    #: Whether the weights in memory are transposed.
    transposed: bool = False


#: Methods by their names in the table.
METHODS = {
    "raw write": Method(save=_raw, suffix=".raw"),
    "torch.save": Method(save=_torch, suffix=".pth"),
    "sluice.save .pth": Method(save=_sluice, suffix=".pth"),
    "safetensors.save_file": Method(save=_safetensors, suffix=".safetensors"),
    "sluice.save .safetensors": Method(save=_sluice, suffix=".safetensors"),
    "torch.save of .to(bf16)": Method(save=_torch_bf16, suffix=".pth"),
    "sluice.save .pth, dtype=bf16": Method(save=_sluice_bf16, suffix=".pth"),
    "transposed: safetensors.save_file of .contiguous()": Method(
        save=_safetensors_contiguous, suffix=".safetensors", transposed=True
    ),
    "transposed: sluice.save .safetensors": Method(save=_sluice, suffix=".safetensors", transposed=True),
}


def _child(method: Method, size: str, path: Path) -> None:
    """Save once and print the seconds and the peak."""
    state: _State = dict(random_state_dict(size, torch.float32))
    if method.transposed:
        state = {name: tensor.mT if tensor.dim() > 1 else tensor for name, tensor in state.items()}
    small = path.with_name(f"small{method.suffix}")
    method.save({"w": torch.ones(3)}, small)  # imports and work on first use
    small.unlink()
    os.sync()
    with PeakMeter() as meter:
        started = time.perf_counter()
        method.save(state, path)
        seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "peak": meter.peaks.total_bytes, "nbytes": path.stat().st_size}))


def _run(method: str, size: str, folder: Path) -> dict[str, Any]:
    path = folder / f"model{METHODS[method].suffix}"
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
    """Compare saves: seconds until the file is durable, and peak memory; each in a fresh process, interleaved."""
    if child is not None:
        assert directory is not None
        _child(METHODS[child], size, directory / f"model{METHODS[child].suffix}")
        return
    console = console_for_tables()
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
    lines = _table(done)
    command = " ".join(
        ["python -m bench.save", f"--size {size}", f"--runs {runs}", *(f"--method {m!r}" for m in methods)]
    )
    show_document(console, out, "save", {"command": command, "machine": machine, "runs": done}, lines)


if __name__ == "__main__":
    main()
