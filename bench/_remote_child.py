"""The processes of ``bench.remote``: each loads once. They are forked from a server that has imported torch."""

from __future__ import annotations

import os
import time
import traceback
from importlib import import_module
from multiprocessing.connection import Connection

import torch
from msgspec import Struct

from bench._rank_child import empty_model
from bench._raw_http import huge_memory
from bench._remote_methods import METHODS, Checkpoint, bit_sum, environment
from sluice.machine.peaks import restart_peak

__all__ = ["Job", "Loaded", "work"]

_PAGE_BYTES = 4096


class Job(Struct, frozen=True, kw_only=True):
    """A load."""

    method: str
    checkpoint: Checkpoint
    #: Size of GPT-2.
    size: str
    #: Dtype of the finished model.
    dtype: str
    #: Bytes of memory that are touched and freed first: the host of a virtual machine reclaims what is free.
    warm_bytes: int
    #: Where files can be downloaded to.
    folder: str


class Loaded(Struct, frozen=True, kw_only=True):
    """Result of a load."""

    seconds: float = 0.0
    #: Processor time of the process.
    cpu: float = 0.0
    #: Growth of memory, in bytes.
    growth: int = 0
    #: Sum of the bit patterns of the weights; None if the method does not fill the model.
    total: int | None = None
    #: Why there is no result.
    problem: str = ""


def work(job: Job, answers: Connection) -> None:
    """Load and send what was found."""
    try:
        os.environ |= {**environment(job.checkpoint), "SLUICE_BENCH_FOLDER": job.folder}
        answers.send(_load(job))
    except ImportError as error:
        answers.send(Loaded(problem=f"not installed: {error.name or error}"))
    except BaseException:  # noqa: BLE001  (sent to the parent)
        answers.send(Loaded(problem=traceback.format_exc(limit=-1).strip().splitlines()[-1][:200]))


def _load(job: Job) -> Loaded:
    method = METHODS[job.method]
    for name in method.imports:
        import_module(name)
    model = empty_model(job.size).to(getattr(torch, job.dtype))
    # Huge pages: small ones that were freed would have to be joined on the clock.
    with huge_memory(job.warm_bytes) as touched:
        touched[::_PAGE_BYTES] = bytes(len(touched) // _PAGE_BYTES)
    restart_peak()
    before, used, began = _status("VmRSS"), time.process_time(), time.perf_counter()
    method.load(model, job.checkpoint)
    weights = [each.detach().reshape(-1) for each in model.parameters()] if method.fills else []
    for each in weights:
        each[:: _PAGE_BYTES // each.element_size()].sum()  # reads a value of every page
    seconds, cpu, growth = time.perf_counter() - began, time.process_time() - used, _status("VmHWM") - before
    total = sum(bit_sum(each) for each in weights) if method.fills else None
    return Loaded(seconds=seconds, cpu=cpu, growth=growth, total=total)


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
