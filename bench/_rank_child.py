"""The processes of ``bench.ranks``: each is one rank of a gloo group that loads a divided model once.

They are forked from a server that has imported torch, so that each is new and starts at once.
"""

from __future__ import annotations

import os
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn

from bench._rank_methods import METHODS
from sluice.benchmark.gpt2 import CausalAttention, build
from sluice.machine.peaks import restart_peak

__all__ = ["Job", "Loaded", "empty_model", "work"]


_PAGE_BYTES = 4096


class Job(Struct, frozen=True, kw_only=True):
    """A load by one rank."""

    method: str
    path: Path
    #: Size of GPT-2.
    size: str
    #: Dtype of the finished model.
    dtype: str
    rank: int
    ranks: int
    #: File through which the ranks find each other.
    store: str


class Loaded(Struct, frozen=True, kw_only=True):
    """Result of the load of one rank."""

    seconds: float = 0.0
    #: Growth of memory, in bytes.
    growth: int = 0
    #: Bytes of the weights that it holds.
    held: int = 0
    #: Bytes that it fetched from disks.
    fetched: int = 0
    #: Sum of its weights.
    total: float = 0.0
    #: Why there is no result.
    problem: str = ""


def empty_model(size: str) -> nn.Module:
    """Return the model on the meta device without its causal masks, which every rank would hold whole."""
    with torch.device("meta"):
        model = build(size)
    for part in model.modules():
        if isinstance(part, CausalAttention):
            part.register_buffer("mask", torch.zeros(1), persistent=False)
    return model


def work(job: Job, answers: Connection) -> None:
    """Load as one rank and send what was found."""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.ranks)
        answers.send(_load(job))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  (sent to the parent)
        answers.send(Loaded(problem=traceback.format_exc(limit=-2).strip().splitlines()[-1]))


def _load(job: Job) -> Loaded:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = empty_model(job.size).to(getattr(torch, job.dtype))
    fully_shard(model, mesh=init_device_mesh("cpu", (job.ranks,)))
    held = sum(_local(parameter).nbytes for parameter in model.parameters())
    dist.barrier()
    restart_peak()
    before, read, began = _status("VmRSS"), _fetched(), time.perf_counter()
    METHODS[job.method].load(model, job.path)
    held_here = [_local(parameter).detach().flatten() for parameter in model.parameters()]
    for weights in held_here:
        weights[:: _PAGE_BYTES // weights.element_size()].sum()  # reads a value of every page
    seconds, growth = time.perf_counter() - began, _status("VmHWM") - before
    total = sum(float(weights.sum(dtype=torch.float64)) for weights in held_here)
    return Loaded(seconds=seconds, growth=growth, held=held, fetched=_fetched() - read, total=total)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor


def _fetched() -> int:
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
