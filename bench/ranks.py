"""``python -m bench.ranks``: loads of one model by the ranks of one host, each way in new processes.

GPT-2 is divided by ``fully_shard`` over gloo on the CPU. Files are dropped from the page cache before a cold load. The
clock starts after imports, the process group and the model; memory is the growth of each process from there, and ends
when every weight was touched. Every way must finish with the same values.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from bench._common import options, show, working_folder, write_shards
from bench._rank_methods import DCP, FILE, METHODS, SHARDS, join_ranks
from bench._stream_methods import fetched_bytes
from sluice.benchmark.gpt2 import CausalAttention, gpt2, random_weight, write_checkpoint
from sluice.benchmark.machine import make_cold, make_warm
from sluice.benchmark.process import run_tasks
from sluice.benchmark.records import BenchTask, Work
from sluice.benchmark.results import TableSection

__all__ = ["Cell", "empty_model", "main", "section", "work"]

_TIMEOUT_SECONDS = 300
_SHARD_COUNT = 8
_PAGE_BYTES = 4096
MIB = 1 << 20


def empty_model(size: str) -> nn.Module:
    """Return the model on the meta device without its causal masks, which every rank would hold whole."""
    with torch.device("meta"):
        model = gpt2(size)
    for part in model.modules():
        if isinstance(part, CausalAttention):
            part.register_buffer("mask", torch.zeros(1), persistent=False)
    return model


def work(method: str, path: str, size: str, dtype: str, rank: int, ranks: int, store: str) -> Work:
    """Load as one rank. Returns the bytes that it holds and fetched, and the sum of its weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for name in ("sluice.api.load", "torch.distributed.checkpoint.state_dict", *METHODS[method].imports):
        import_module(name)
    join_ranks(rank, ranks, store)
    model = empty_model(size).to(getattr(torch, dtype))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    held = sum(_local(parameter).nbytes for parameter in model.parameters())
    yield
    dist.barrier()
    read = fetched_bytes()
    yield
    METHODS[method].load(model, Path(path))
    weights = [_local(parameter).detach().flatten() for parameter in model.parameters()]
    for each in weights:
        each[:: _PAGE_BYTES // each.element_size()].sum()  # reads a value of every page
    yield
    total = sum(float(each.sum(dtype=torch.float64)) for each in weights)
    return {"held": held, "fetched": fetched_bytes() - read, "total": total}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load by all ranks."""

    method: str
    file: str
    ranks: int
    dtype: str
    cold: bool
    #: Seconds of each run, until the slowest rank was ready.
    seconds: tuple[float, ...] = ()
    #: Growth of each rank, in bytes; of the run in which the host grew most.
    growth: tuple[int, ...] = ()
    #: Bytes of the weights that each rank holds.
    held: tuple[int, ...] = ()
    #: Bytes that all ranks fetched from disks, as a multiple of those of the file.
    fetched: float = 0.0
    #: Sum of the weights of all ranks.
    total: float = 0.0
    #: Why there is no result.
    problem: str = ""


def _write(folder: Path, size: str) -> dict[str, Path]:
    """Write the checkpoints in fp32, and return the path of each kind."""
    shapes = {name: tensor.shape for name, tensor in empty_model(size).state_dict().items()}
    paths = {FILE: folder / f"{size}.pth", SHARDS: folder / f"{size}-shards", DCP: folder / f"{size}-dcp"}
    if not paths[SHARDS].exists():
        state = {name: random_weight(name, shape) for name, shape in shapes.items()}
        write_checkpoint(state, paths[FILE])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that one process saves
            save_distributed(state, checkpoint_id=paths[DCP], no_dist=True)
        write_shards(state, paths[SHARDS], _SHARD_COUNT)
        os.sync()
    return paths


def _loaded(cell: Cell, path: Path, size: str, runs: int) -> Cell:
    """Load several times, and return the cell with its figures."""
    nbytes = path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())
    for _ in range(runs):
        (make_cold if cell.cold else make_warm)(path)
        with tempfile.TemporaryDirectory() as folder:
            job = {"method": cell.method, "path": str(path), "size": size, "dtype": cell.dtype, "ranks": cell.ranks}
            tasks = [
                # Seldom sampled: the processors are for the ranks, and the kernel records the peak.
                BenchTask(
                    work="bench.ranks:work",
                    arguments={**job, "rank": rank, "store": f"{folder}/store"},
                    sample_seconds=0.1,
                )
                for rank in range(cell.ranks)
            ]
            found = run_tasks(tasks, timeout_seconds=_TIMEOUT_SECONDS)
        if problems := [each.reason for each in found if each.status != "ok"]:
            return replace(cell, seconds=(), problem=problems[0])
        cell = replace(
            cell,
            seconds=(*cell.seconds, max(each.seconds for each in found)),
            growth=max(cell.growth, tuple(each.total_bytes for each in found), key=sum),
            held=tuple(each.facts["held"] for each in found),
            fetched=sum(each.facts["fetched"] for each in found) / nbytes,
            total=sum(each.facts["total"] for each in found),
        )
    return cell


def _cells(
    paths: Mapping[str, Path], size: str, worlds: Sequence[int], dtypes: Sequence[str], runs: int
) -> Iterator[Cell]:
    sums: dict[str, float] = {}
    for dtype, (kind, path), world, cold in product(dtypes, paths.items(), worlds, (True, False)):
        for name, method in METHODS.items():
            if kind in method.reads:
                cell = Cell(method=name, file=kind, ranks=world, dtype=dtype, cold=cold)
                cell = _loaded(cell, path, size, runs)
                if cell.seconds and abs(cell.total - sums.setdefault(dtype, cell.total)) > 1e-6 * abs(cell.total):
                    cell = replace(cell, problem=f"the weights add up to {cell.total}, not {sums[dtype]}")
                yield cell


def section(cells: Sequence[Cell]) -> TableSection:
    """Return the table."""
    return TableSection(
        title="",
        headings=(
            *("method", "file", "dtype", "ranks", "page cache", "s"),
            *("fullest rank", "its shard", "host", "read / file", "remark"),
        ),
        rows=tuple(map(_row, cells)),
    )


def _row(cell: Cell) -> tuple[str, ...]:
    figures: tuple[str, ...] = ("-",) * 5
    if cell.seconds:
        sizes = (f"{nbytes / MIB:,.0f}" for nbytes in (max(cell.growth), max(cell.held), sum(cell.growth)))
        figures = (f"{median(cell.seconds):.2f}", *sizes, f"{cell.fetched:.2f}")
    cache = "cold" if cell.cold else "cached"
    return (cell.method, cell.file, cell.dtype, str(cell.ranks), cache, *figures, cell.problem)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options(size="medium")
@click.option("--ranks", type=int, multiple=True, default=(1, 2, 4), show_default=True, help="Number of processes.")
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--file", "kinds", type=click.Choice([FILE, SHARDS, DCP]), multiple=True, help="Only this.")
def main(
    size: str,
    runs: int,
    directory: Path | None,
    out: Path,
    ranks: Sequence[int],
    dtypes: Sequence[str],
    kinds: Sequence[str],
) -> None:
    """Load a divided model by 1 to 4 ranks of this host, with sluice and with what people use today."""
    with working_folder(directory) as folder:
        paths = {kind: path for kind, path in _write(folder, size).items() if not kinds or kind in kinds}
        cells = []
        for cell in _cells(paths, size, ranks, dtypes, runs):
            cells.append(cell)
            click.echo(" | ".join(_row(cell)))
    records: list[dict[str, Any]] = [asdict(cell) for cell in cells]
    show(out, "ranks", ("torch", "sluice", "safetensors", "accelerate"), [section(cells)], cells=records)


if __name__ == "__main__":
    main()
