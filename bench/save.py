"""``python -m bench.save``: time and memory to save GPT-2 with sluice, torch.save, safetensors and a raw write.

Every save runs in a process of its own and writes a new file of the same weights. The clock stops when the file and its
name are durable: methods that do not sync are followed by a sync, which is timed as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import safetensors.torch
import torch

import sluice
from bench._common import options, run_alone, show, working_folder
from sluice.benchmark.gpt2 import random_state_dict
from sluice.benchmark.records import Outcome, Work
from sluice.benchmark.results import TableSection

__all__ = ["METHODS", "main", "section", "work"]

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
    _torch({name: tensor.to(torch.bfloat16) for name, tensor in state.items()}, path)


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


def work(method: str, size: str, folder: str) -> Work:
    """Save once: the work of a process. Returns the size of the file, which is removed."""
    chosen, path = METHODS[method], Path(folder, f"model{METHODS[method].suffix}")
    state: _State = dict(random_state_dict(size, torch.float32))
    if chosen.transposed:
        state = {name: tensor.mT if tensor.dim() > 1 else tensor for name, tensor in state.items()}
    small = path.with_name(f"small{chosen.suffix}")
    chosen.save({"w": torch.ones(3)}, small)  # imports and work on first use
    small.unlink()
    path.unlink(missing_ok=True)
    os.sync()
    yield
    yield
    chosen.save(state, path)
    yield
    nbytes = path.stat().st_size
    path.unlink()
    return {"nbytes": nbytes}


def section(done: dict[str, list[Outcome]]) -> TableSection:
    """Return the table: medians."""
    raw = median(run.seconds for run in done["raw write"]) if "raw write" in done else None
    rows = []
    for method, runs in done.items():
        seconds = [run.seconds for run in runs]
        rows.append((
            method,
            f"{runs[0].facts['nbytes'] / 1e9:.2f}",
            *(f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds))),
            f"{median(seconds) / raw:.2f}" if raw else "-",
            f"{max(run.total_bytes for run in runs) / 2**20:.0f}",
        ))  # fmt: skip
    headings = ("method", "file GB", "seconds", "from", "to", "/ raw write", "peak MiB")
    return TableSection(title="", headings=headings, rows=tuple(rows))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options(size="medium", runs=5)
@click.option("--method", "methods", type=click.Choice(list(METHODS)), multiple=True, default=tuple(METHODS))
def main(size: str, runs: int, directory: Path | None, out: Path, methods: Sequence[str]) -> None:
    """Compare saves: seconds until the file is durable, and peak memory; each in a fresh process, interleaved."""
    done: dict[str, list[Outcome]] = {method: [] for method in methods}
    with working_folder(directory) as folder:
        for _ in range(runs):
            for method in methods:
                outcome = run_alone("bench.save:work", {"method": method, "size": size, "folder": str(folder)})
                if outcome.status != "ok":
                    raise click.ClickException(f"{method}: {outcome.reason}")
                done[method].append(outcome)
                click.echo(f"{method}: {outcome.seconds:.2f} s")
    runs_of = {method: [run.seconds for run in each] for method, each in done.items()}
    show(out, "save", ("torch", "sluice", "safetensors"), [section(done)], seconds=runs_of)


if __name__ == "__main__":
    main()
