"""Which GPT-2 to compare on this machine when nobody says."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from sluice.benchmark import _machine
from sluice.benchmark._cache import make_cold
from sluice.benchmark._process import run_job
from sluice.benchmark._records import Job
from sluice.benchmark._runner import REFERENCE
from sluice.benchmark.gpt2 import SIZES, final_bytes

__all__ = ["choose_size", "largest_size"]

#: Sizes to choose from: the tiny one only tries the benchmark itself.
_CHOICE = SIZES[1:]

#: A comparison should be over in about two minutes; the estimate is rough, the table better the larger the model.
_BUDGET_SECONDS = 150.0

#: How often a process together with its preparation handles the bytes of the checkpoint; measured over the tutorial's
#: methods in two precisions.
_HANDLINGS_PER_PROCESS = 0.8

#: The hungriest strategy holds 2 F (fp32), and the cached rows need the file in the page cache beside it.
_MEMORY_IN_FINALS = 3.2
_MEMORY_BESIDE_BYTES = 1 << 30

#: One checkpoint in one file, one in a file for every parameter.
_DISK_IN_FINALS = 2.1

#: Bytes of the probe file: long enough for a disk to reach its speed.
_PROBE_BYTES = 128 << 20


def choose_size(
    finals: Mapping[str, int],
    *,
    processes: int,
    memory_bytes: int,
    disk_bytes: int,
    device_bytes: int | None,
    seconds_per_process: float,
    seconds_per_byte: float,
) -> str:
    """Return the largest size that memory, disk and patience allow; the smallest when none does.

    Args:
        finals: F of each size in fp32, the smallest first.
        processes: How many will be run.
        memory_bytes: Free host memory.
        disk_bytes: Free disk space.
        device_bytes: Free memory of the accelerator; None without one.
        seconds_per_process: What a process costs beside its load, from a probe.
        seconds_per_byte: What initialising, writing and reading a byte takes, from a probe.
    """
    chosen = next(iter(finals))
    for size, final in finals.items():
        seconds = processes * (seconds_per_process + _HANDLINGS_PER_PROCESS * seconds_per_byte * final)
        fits = (
            _MEMORY_IN_FINALS * final + _MEMORY_BESIDE_BYTES <= memory_bytes
            and _DISK_IN_FINALS * final <= disk_bytes
            and (device_bytes is None or _DISK_IN_FINALS * final <= device_bytes)
        )
        if fits and seconds <= _BUDGET_SECONDS:
            chosen = size
    return chosen


def largest_size(directory: Path, device: str, *, processes: int) -> str:
    """Return the largest GPT-2 that can be compared here in about two minutes, from two short probes.

    Args:
        directory: Where the checkpoints will be.
        device: Where the finished models will be.
        processes: How many will be run.
    """
    return choose_size(
        {size: final_bytes(size, torch.float32) for size in _CHOICE},
        processes=processes,
        memory_bytes=_machine.free_memory_bytes(),
        disk_bytes=shutil.disk_usage(directory).free,
        device_bytes=torch.cuda.mem_get_info()[0] if device == "cuda" else None,
        seconds_per_process=_probe_seconds_per_process(device),
        seconds_per_byte=_probe_seconds_per_byte(directory),
    )


def _probe_seconds_per_byte(directory: Path) -> float:
    """Return what it takes to initialise, write out and read back one byte in this directory."""
    begin = time.perf_counter()
    probe = directory / "probe"
    numbers = torch.empty(_PROBE_BYTES // 4).uniform_()
    numbers.numpy().tofile(probe)
    make_cold(probe)
    torch.from_file(str(probe), size=numbers.numel(), dtype=torch.float32).clone()
    probe.unlink()
    return (time.perf_counter() - begin) / _PROBE_BYTES


def _probe_seconds_per_process(device: str) -> float:
    """Return what a process takes that hardly loads anything: torch's import, a context and the digests."""
    begin = time.perf_counter()
    run_job(Job(method=REFERENCE, model="tiny", checkpoint="", dtype="float32", device=device, verify=True))
    return time.perf_counter() - begin
