"""The processes of ``bench.everywhere``: each loads a file once, or reads it raw, and reports seconds and wrong values.

They are forked from a server that has imported torch, so that each is new and starts at once.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import sluice
from bench._pattern import Pattern, wrong_tensors
from sluice.benchmark.raw import READ_BYTES, read_file
from sluice.machine.cgroups import memory_groups
from sluice.measuring import limited_group

__all__ = ["METHODS", "Job", "Outcome", "measure"]

_WAITING_THREADS = 8
_HUGE_PAGE_BYTES = 2 << 20

#: Longest time of one load.
_TIMEOUT_SECONDS = 120

#: The contract's growth of memory in addition to the weights and staging: a constant, and per tensor.
_STAGING_BYTES, _CONSTANT_BYTES = 64 << 20, 32 << 20
_TENSOR_BYTES, _LARGE_TENSOR_BYTES, _LARGE_BYTES = 2 << 10, 8 << 10, 1 << 20

#: Memory of a group until its limit is set.
_GENEROUS_BYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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
    #: A file that another process of the same group reads meanwhile; None for no such process.
    rival: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one reading."""

    #: Seconds from the call until every byte was there.
    seconds: float = 0.0
    #: Text of the failure, or the names of wrong tensors; empty without one.
    problem: str = ""


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


def measure(method: str, job: Job, processes: int) -> Outcome:
    """Read a file in new processes at once; the seconds are those of the slowest.

    Args:
        method: One of ``METHODS``, or ``"sluice"``.
        job: What is read.
        processes: Number of processes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench._reads"])
    with ExitStack() as stack:
        groups = job.groups
        limit_file = None
        if job.limited:
            group = stack.enter_context(limited_group(_GENEROUS_BYTES))
            groups = (*groups, group.path / "cgroup.procs")
            limit_file = group.path / ("memory.max" if group.version == 2 else "memory.limit_in_bytes")
        if job.rival:
            rival = context.Process(target=_read_forever, args=(job.rival, groups), daemon=True)
            rival.start()
            stack.callback(rival.join)
            stack.callback(rival.kill)
        barrier = context.Barrier(processes)
        started = []
        for _ in range(processes):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(method, job, groups, limit_file, barrier, theirs))
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            theirs.close()
            started.append((process, ours))
        outcomes = [_outcome(ours) for _, ours in started]
    return Outcome(
        seconds=max(outcome.seconds for outcome in outcomes),
        problem=next((outcome.problem for outcome in outcomes if outcome.problem), ""),
    )


def _outcome(answers: Connection) -> Outcome:
    with answers:
        try:
            if not answers.poll(_TIMEOUT_SECONDS):
                return Outcome(problem=f"not finished after {_TIMEOUT_SECONDS} s")
            answer: Outcome = answers.recv()
            return answer
        except EOFError:
            return Outcome(problem="killed")


def _work(
    method: str, job: Job, groups: tuple[Path, ...], limit_file: Path | None, barrier: Barrier, answers: Connection
) -> None:
    """Read once and send the outcome; the work of a process."""
    try:
        for group in groups:
            group.write_text(str(os.getpid()), encoding="ascii")
        with torch.device("meta"):
            model = Pattern(job.nbytes)
        if method == "sluice":
            _import_everything(job.path.suffix)
        _claim_memory(job.nbytes)
        if limit_file:
            limit_file.write_text(str(_used_bytes(limit_file) + _contract_bytes(model)), encoding="ascii")
        barrier.wait(_TIMEOUT_SECONDS)
        begin = time.perf_counter()
        if method == "sluice":
            sluice.load_into(model, job.path)
        else:
            METHODS[method](job)
        seconds = time.perf_counter() - begin
        wrong = wrong_tensors(model) if method == "sluice" else []
        problem = f"wrong values in {len(wrong)} tensors, first {wrong[0]}" if wrong else ""
        answers.send(Outcome(seconds=seconds, problem=problem))
    except BaseException as error:  # noqa: BLE001  (sent to the parent)
        text = error.strerror if isinstance(error, OSError) and type(error).__module__ == "builtins" else str(error)
        answers.send(Outcome(problem=f"{type(error).__name__}: {text}"))


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


def _claim_memory(nbytes: int) -> None:
    """Touch as much memory as the load will, so that no method pays for what the host had taken back."""
    room = mmap.mmap(-1, nbytes + _STAGING_BYTES, flags=mmap.MAP_PRIVATE)
    room.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(room, dtype=np.uint8)[:: mmap.PAGESIZE] = 1


def _used_bytes(limit_file: Path) -> int:
    """Return the memory of the group that the kernel cannot reclaim, in bytes."""
    group = next(group for group in memory_groups() if Path(group.usage_file).parent == limit_file.parent)
    return group.usage_bytes - group.reclaimable_bytes


def _contract_bytes(model: torch.nn.Module) -> int:
    sizes = [int(tensor.nbytes) for tensor in model.state_dict().values()]
    each = sum(_TENSOR_BYTES + (_LARGE_TENSOR_BYTES if size >= _LARGE_BYTES else 0) for size in sizes)
    return sum(sizes) + _STAGING_BYTES + _CONSTANT_BYTES + each


def _read_forever(path: Path, groups: tuple[Path, ...]) -> None:
    """Read a file through the page cache again and again, as a member of the groups."""
    for group in groups:
        group.write_text(str(os.getpid()), encoding="ascii")
    with path.open("rb", buffering=0) as stream:
        buffer = bytearray(1 << 20)
        while True:
            if not stream.readinto(buffer):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                stream.seek(0)
