"""``python -m bench.save``: time and memory to save GPT-2 with sluice, torch, safetensors and raw writes.

Every save runs in processes of its own and writes new files of the same weights: one process, or two ranks that hold a
half of each weight. The clock stops when the files and their names are durable, for the slower rank: methods that do
not sync are followed by a sync, which is timed as well.

The goals: a save to .safetensors takes at most 1.05 times as long as a raw direct write of the same weights with the
same syncs, and one to .pth at most 1.15 times. The command fails if one is missed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import click
import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import sluice
from bench._common import options, show, working_folder
from bench._rank_methods import join_ranks
from bench._raw import write_direct
from sluice.benchmark.gpt2 import random_state_dict
from sluice.benchmark.process import run_tasks
from sluice.benchmark.records import BenchTask, Outcome, Work
from sluice.benchmark.results import TableSection

__all__ = ["METHODS", "RAW", "failed", "main", "remove", "section", "work", "written_bytes"]

#: The method that the ratios and the goals refer to.
RAW = "raw direct write"

#: Bytes of one write of the raw methods through the page cache and past it, and writes in flight: the fastest.
_PIECE_BYTES, _DIRECT_BYTES, _DIRECT_THREADS = 16 << 20, 4 << 20, 4

_State = dict[str, torch.Tensor]


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def written_bytes(path: Path) -> int:
    """Return the size of a file, or of all files of a directory."""
    return sum(file.stat().st_size for file in _files(path))


def _synced(path: Path) -> None:
    """Sync a file or the files of a directory, and the directories, as a durable save must."""
    for each in dict.fromkeys([*_files(path), path, path.parent]):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.flatten().view(torch.uint8).numpy()


def _raw(state: _State, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for tensor in state.values():
        view = memoryview(_bytes(tensor).data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            while piece:
                piece = piece[os.write(descriptor, piece) :]
    os.close(descriptor)
    _synced(path)


def _raw_direct(state: _State, path: Path) -> None:
    write_direct(str(path), list(map(_bytes, state.values())), threads=_DIRECT_THREADS, piece_bytes=_DIRECT_BYTES)
    _synced(path)


def _torch(state: _State, path: Path) -> None:
    torch.save(state, path)
    _synced(path)


def _safetensors(state: _State, path: Path) -> None:
    safetensors.torch.save_file(state, path)
    _synced(path)


def _dcp(state: _State, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that one process saves
        save_distributed(dict(state), checkpoint_id=path, no_dist=not dist.is_initialized())
    _synced(path)


def _sluice(state: _State, path: Path) -> None:
    sluice.save(state, path)


def _sluice_dcp(state: _State, path: Path) -> None:
    sluice.save(state, path, format="dcp")


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
    #: Suffix of the file or directory.
    suffix: str
    #: Whether the weights in memory are transposed.
    transposed: bool = False
    #: Number of processes that hold a part of each weight.
    ranks: int = 1
    #: Most time relative to the raw direct write; None for no goal.
    goal: float | None = None


#: Methods by their names in the table.
METHODS = {
    RAW: Method(save=_raw_direct, suffix=".raw"),
    "raw write": Method(save=_raw, suffix=".raw"),
    "torch.save": Method(save=_torch, suffix=".pth"),
    "sluice.save .pth": Method(save=_sluice, suffix=".pth", goal=1.15),
    "safetensors.save_file": Method(save=_safetensors, suffix=".safetensors"),
    "sluice.save .safetensors": Method(save=_sluice, suffix=".safetensors", goal=1.05),
    "DCP": Method(save=_dcp, suffix=".dcp"),
    "sluice.save, DCP": Method(save=_sluice_dcp, suffix=".dcp"),
    "torch.save of .to(bf16)": Method(save=_torch_bf16, suffix=".pth"),
    "sluice.save .pth, dtype=bf16": Method(save=_sluice_bf16, suffix=".pth"),
    "transposed: safetensors.save_file of .contiguous()": Method(
        save=_safetensors_contiguous, suffix=".safetensors", transposed=True
    ),
    "transposed: sluice.save .safetensors": Method(save=_sluice, suffix=".safetensors", transposed=True),
    "2 ranks: DCP": Method(save=_dcp, suffix=".dcp", ranks=2),
    "2 ranks: sluice.save, DCP": Method(save=_sluice_dcp, suffix=".dcp", ranks=2),
    "2 ranks: sluice.save .safetensors": Method(save=_sluice, suffix=".safetensors", ranks=2),
}


def work(method: str, size: str, folder: str, rank: int, store: str) -> Work:
    """Save once: the work of a process, one of all ranks. Returns the size of what was written, which is removed."""
    chosen, path = METHODS[method], Path(folder, f"model{METHODS[method].suffix}")
    state: _State = dict(random_state_dict(size, torch.float32))
    if chosen.transposed:
        state = {name: tensor.mT if tensor.dim() > 1 else tensor for name, tensor in state.items()}
    small, first = path.with_name(f"small{chosen.suffix}"), {"w": torch.ones(3)}
    if chosen.ranks > 1:
        join_ranks(rank, chosen.ranks, store)
        state, first = _divided(state), _divided(first)
    chosen.save(first, small)  # imports and work on first use
    if chosen.ranks > 1:
        dist.barrier()
    if rank == 0:
        remove(small)
        remove(path)
    os.sync()
    yield
    yield
    chosen.save(state, path)
    yield
    nbytes = written_bytes(path)
    if chosen.ranks > 1:
        dist.barrier()
    if rank == 0:
        remove(path)
    return {"nbytes": nbytes}


def _divided(state: _State) -> _State:
    """Return the part of each weight that this rank holds, in memory of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        name: DTensor.from_local(
            tensor.tensor_split(ranks)[rank].clone(), mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride()
        )
        for name, tensor in state.items()
    }


def remove(path: Path) -> None:
    """Remove a file, or a directory with its files."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _measured(method: str, size: str, folder: Path) -> Outcome:
    """Save once, and return the outcome of the slowest rank with the memory of the fullest."""
    with tempfile.TemporaryDirectory() as other:
        job = {"method": method, "size": size, "folder": str(folder), "store": f"{other}/store"}
        ranks = range(METHODS[method].ranks)
        outcomes = run_tasks([BenchTask(work="bench.save:work", arguments={**job, "rank": rank}) for rank in ranks])
    for outcome in outcomes:
        if outcome.status != "ok":
            raise click.ClickException(f"{method}: {outcome.reason}")
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    return replace(slowest, total_bytes=max(outcome.total_bytes for outcome in outcomes))


def _ratio(done: dict[str, list[Outcome]], method: str) -> float | None:
    """Return the time of a method relative to the raw direct write; None if that was not run."""
    if RAW not in done:
        return None
    ours, raw = (median(run.seconds for run in done[each]) for each in (method, RAW))
    return ours / raw


def failed(done: dict[str, list[Outcome]]) -> list[str]:
    """Return the methods that missed their goals."""
    ratios = {method: _ratio(done, method) for method in done}
    return [method for method, ratio in ratios.items() if ratio is not None and ratio > (METHODS[method].goal or ratio)]


def section(done: dict[str, list[Outcome]]) -> TableSection:
    """Return the table: medians."""
    rows = []
    for method, runs in done.items():
        seconds, ratio, goal = [run.seconds for run in runs], _ratio(done, method), METHODS[method].goal
        rows.append((
            method,
            f"{runs[0].facts['nbytes'] / 1e9:.2f}",
            *(f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds))),
            *("-" if value is None else f"{value:.2f}" for value in (ratio, goal)),
            f"{max(run.total_bytes for run in runs) / 2**20:.0f}",
        ))  # fmt: skip
    headings = ("method", "file GB", "seconds", "from", "to", "/ raw direct", "goal", "peak MiB")
    return TableSection(title="", headings=headings, rows=tuple(rows))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options(size="medium", runs=5)
@click.option("--method", "methods", type=click.Choice(list(METHODS)), multiple=True, default=tuple(METHODS))
def main(size: str, runs: int, directory: Path | None, out: Path, methods: Sequence[str]) -> None:
    """Compare saves: seconds until the files are durable, and peak memory; each in new processes, interleaved."""
    done: dict[str, list[Outcome]] = {method: [] for method in methods}
    with working_folder(directory) as folder:
        for _ in range(runs):
            for method in methods:
                outcome = _measured(method, size, folder)
                done[method].append(outcome)
                click.echo(f"{method}: {outcome.seconds:.2f} s")
    runs_of = {method: [run.seconds for run in each] for method, each in done.items()}
    show(out, "save", ("torch", "sluice", "safetensors"), [section(done)], seconds=runs_of)
    if failed(done):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
