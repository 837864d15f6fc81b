"""The processes of ``bench.everywhere``: each loads a file once, or reads it raw, and returns wrong values."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from safetensors.torch import save_file

import sluice
from bench._pattern import Pattern, wrong_tensors
from bench._raw import READ_BYTES, read_file
from sluice.benchmark.child import touch_free_memory
from sluice.benchmark.process import run_tasks
from sluice.benchmark.records import BenchTask, Work
from sluice.machine.cgroups import memory_groups
from sluice.measuring import limited_group

__all__ = ["METHODS", "Job", "measure", "work"]

_WAITING_THREADS = 8
_HUGE_PAGE_BYTES = 2 << 20

#: Longest time of one load.
_TIMEOUT_SECONDS = 120

#: The contract's growth of memory in addition to the weights and staging: a constant, and per tensor.
_STAGING_BYTES, _CONSTANT_BYTES = 64 << 20, 32 << 20
_TENSOR_BYTES, _LARGE_TENSOR_BYTES, _LARGE_BYTES = 2 << 10, 8 << 10, 1 << 20

#: Memory of a group until its limit is set.
_GENEROUS_BYTES = 1 << 40

#: Joins groups and reads a file through the page cache again and again.
_RIVAL = """
import os, sys
path, *groups = sys.argv[1:]
for group in groups:
    open(group, "w").write(str(os.getpid()))
with open(path, "rb", buffering=0) as stream:
    buffer = bytearray(1 << 20)
    while True:
        if not stream.readinto(buffer):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            stream.seek(0)
"""


class Job(Struct, frozen=True, kw_only=True):
    """One reading of a file."""

    path: Path
    #: Bytes of the model.
    nbytes: int
    #: Threads of raw reads that wait for no disk.
    cores: int
    #: Whether the file is on a disk.
    has_disk: bool
    #: Files of control groups to join.
    groups: tuple[Path, ...] = ()
    #: Whether the memory is limited to the contract.
    limited: bool = False
    #: File with the limit of the memory of a group, which is set to the contract.
    limit_file: Path | None = None
    #: A file that another process of the same group reads meanwhile; None for no such process.
    rival: Path | None = None


def _direct(job: Job) -> None:
    read_file(str(job.path), direct=True, threads=_WAITING_THREADS)


def _buffered(job: Job) -> None:
    read_file(str(job.path), direct=False, threads=_WAITING_THREADS if job.has_disk else job.cores)


def _mapped(job: Job) -> None:
    """Copy the mapped file into memory of the process, as the other reads and every load do."""
    with job.path.open("rb") as stream:
        file = np.frombuffer(mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint8)
    room = mmap.mmap(-1, -(-file.size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    room.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(room, dtype=np.uint8)

    def copy(start: int) -> None:
        end = min(start + READ_BYTES, file.size)
        np.copyto(memory[start:end], file[start:end])

    with ThreadPoolExecutor(_WAITING_THREADS if job.has_disk else job.cores) as pool:
        for _ in pool.map(copy, range(0, file.size, READ_BYTES)):
            pass


#: Raw reads by name.
METHODS: dict[str, Callable[[Job], None]] = {"direct": _direct, "buffered": _buffered, "mapped": _mapped}


def measure(method: str, job: Job, processes: int) -> tuple[float, str]:
    """Read a file in new processes at once; return the seconds of the slowest, and the problem if there is one.

    Args:
        method: One of ``METHODS``, or ``"sluice"``.
        job: What is read.
        processes: Number of processes.
    """
    with ExitStack() as stack:
        if job.limited:
            group = stack.enter_context(limited_group(_GENEROUS_BYTES))
            limit = group.path / ("memory.max" if group.version == 2 else "memory.limit_in_bytes")
            job = msgspec.structs.replace(job, groups=(*job.groups, group.path / "cgroup.procs"), limit_file=limit)
        if job.rival:
            rival = subprocess.Popen([sys.executable, "-c", _RIVAL, job.rival, *job.groups])
            stack.enter_context(rival)
            stack.callback(rival.kill)
        arguments = {"method": method, "job": msgspec.to_builtins(job, enc_hook=str)}
        tasks = [BenchTask(work="bench._reads:work", arguments=arguments, sample_seconds=0.1)] * processes
        found = run_tasks(tasks, timeout_seconds=_TIMEOUT_SECONDS)
    wrong: Sequence[str] = next((each.facts["wrong"] for each in found if each.facts.get("wrong")), ())
    problem = f"wrong values in {len(wrong)} tensors, first {wrong[0]}" if wrong else ""
    return max(each.seconds for each in found), problem or next((each.reason for each in found if each.reason), "")


def _decoded(kind: type, value: str) -> object:
    return kind(value)


def work(method: str, job: dict[str, object]) -> Work:
    """Read once: the work of a process. Returns the names of wrong tensors."""
    one = msgspec.convert(job, Job, dec_hook=_decoded)
    for group in one.groups:
        group.write_text(str(os.getpid()), encoding="ascii")
    with torch.device("meta"):
        model = Pattern(one.nbytes)
    if method == "sluice":
        _import_everything(one.path.suffix)
    gc.collect()  # what imports made: no pass over it falls into the time of a method
    touch_free_memory(one.nbytes + _STAGING_BYTES)
    if one.limit_file:
        allowed = _used_bytes(one.limit_file) + _contract_bytes(model)
        one.limit_file.write_text(str(allowed), encoding="ascii")
    yield
    yield
    if method == "sluice":
        sluice.load_into(model, one.path)
    else:
        METHODS[method](one)
    yield
    return {"wrong": wrong_tensors(model) if method == "sluice" else []}


def _import_everything(suffix: str) -> None:
    """Load a file of one tensor in the same format, so that the clock measures reads and not imports."""
    state = {"weight": torch.ones(1, 1)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"one{suffix}"
        if suffix == ".safetensors":
            save_file(state, path)
        else:
            torch.save(state, path)
        with torch.device("meta"):
            model = torch.nn.Linear(1, 1, bias=False)
        sluice.load_into(model, path)


def _used_bytes(limit_file: Path) -> int:
    """Return the memory of the group that the kernel cannot reclaim, in bytes."""
    group = next(group for group in memory_groups() if Path(group.usage_file).parent == limit_file.parent)
    return group.usage_bytes - group.reclaimable_bytes


def _contract_bytes(model: torch.nn.Module) -> int:
    sizes = [int(tensor.nbytes) for tensor in model.state_dict().values()]
    each = sum(_TENSOR_BYTES + (_LARGE_TENSOR_BYTES if size >= _LARGE_BYTES else 0) for size in sizes)
    return sum(sizes) + _STAGING_BYTES + _CONSTANT_BYTES + each
