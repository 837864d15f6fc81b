"""Choose a default comparison for this machine: the size of GPT-2, the states of the page cache, the dtypes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice.benchmark import machine as _machine
from sluice.benchmark.cache import make_cold
from sluice.benchmark.gpt2 import SIZES, final_bytes
from sluice.benchmark.loads import run_job
from sluice.benchmark.records import REFERENCE, MethodJob, Precision, State

__all__ = ["END_SECONDS", "Choice", "Conditions", "Extent", "choose", "choose_here"]

#: Sizes to choose from; the tiny one is for tests of the benchmark.
_CHOICE = SIZES[1:]

#: Longest estimate of a comparison, including the creation of its checkpoints.
_BUDGET_SECONDS = 120.0

#: Time of the whole command after which a chosen comparison starts no load: the machine became busier than estimated.
END_SECONDS = 180.0

#: States of the page cache and dtypes of a comparison.
Extent = tuple[tuple[State, ...], tuple[Precision, ...]]

#: How often a process, with its preparation, handles the bytes of the checkpoint. Measured over the tutorial's methods
#: in two precisions: 0.8 to 2.3, more on busier machines. With 1.0 a comparison on an idle machine took 104 s, with an
#: estimate of 108 s.
_HANDLINGS_PER_PROCESS = 1.0

#: The same for creating the two checkpoints.
_HANDLINGS_AT_FIRST = 1.75

#: Needed memory: the largest strategy holds 2 F (fp32), and warm runs need the file in the page cache as well.
_MEMORY_IN_FINALS = 3.2
_MEMORY_BESIDE_BYTES = 1 << 30

#: Needed disk space in F: a checkpoint in one file, and one with a file per parameter.
_DISK_IN_FINALS = 2.1

#: Size of the probe file in bytes: large enough for a disk to reach its speed.
_PROBE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Memory, disk space and speed of a machine."""

    #: Free host memory, in bytes.
    memory_bytes: int
    #: Free disk space, in bytes.
    disk_bytes: int
    #: Free memory of the accelerator, in bytes; None without one.
    device_bytes: int | None = None
    #: Overhead of a process in addition to its load, from a probe.
    seconds_per_process: float
    #: Time to initialize, write and read a byte, from a probe.
    seconds_per_byte: float

    def has_room(self, final: int) -> bool:
        """Return whether memory and disk suffice for a model of ``final`` bytes in fp32."""
        return (
            _MEMORY_IN_FINALS * final + _MEMORY_BESIDE_BYTES <= self.memory_bytes
            and _DISK_IN_FINALS * final <= self.disk_bytes
            and (self.device_bytes is None or _DISK_IN_FINALS * final <= self.device_bytes)
        )

    def seconds(self, final: int, processes: int) -> float:
        """Estimate the time to create the checkpoints and run ``processes`` processes."""
        handled = self.seconds_per_byte * final
        return _HANDLINGS_AT_FIRST * handled + processes * (self.seconds_per_process + _HANDLINGS_PER_PROCESS * handled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A chosen comparison."""

    #: One of ``gpt2.SIZES``.
    size: str
    #: States of the page cache, and dtypes of the finished models.
    states: tuple[State, ...]
    dtypes: tuple[Precision, ...]
    #: Estimated time, in seconds.
    seconds: float
    #: Why no larger size was chosen, for messages.
    reason: str


def choose(finals: Mapping[str, int], processes: Mapping[Extent, int], conditions: Conditions) -> Choice:
    """Return the first extent with a size that fits memory, disk and two minutes, and the largest such size.

    If nothing fits, return the smallest size with the last extent.

    Args:
        finals: F of each size in fp32, in bytes, smallest first.
        processes: Number of processes for each extent, the most first.
        conditions: The machine.
    """
    roomy = [size for size, final in finals.items() if conditions.has_room(final)] or list(finals)[:1]
    states, dtypes = list(processes)[-1]
    size = roomy[0]
    for extent, count in processes.items():
        quick = [each for each in roomy if conditions.seconds(finals[each], count) <= _BUDGET_SECONDS]
        if quick:
            size, (states, dtypes) = quick[-1], extent
            break
    count = processes[states, dtypes]
    larger = next((other for other in finals if finals[other] > finals[size]), None)
    if larger is None:
        reason = "it is the largest size"
    elif larger not in roomy:
        reason = f"memory or disk space is too small for GPT-2 {larger}"
    else:
        reason = f"GPT-2 {larger} would take about {conditions.seconds(finals[larger], count):.0f} s"
    if (states, dtypes) != next(iter(processes)):
        reason += "; the machine is too slow or busy for all dtypes and states in two minutes"
    seconds = conditions.seconds(finals[size], count)
    return Choice(size=size, states=states, dtypes=dtypes, seconds=seconds, reason=reason)


def choose_here(directory: Path, device: str, processes: Mapping[Extent, int]) -> Choice:
    """Choose a comparison of about two minutes for this machine, from two short probes.

    Args:
        directory: Directory of the checkpoints.
        device: Device of the finished models.
        processes: As for ``choose``.
    """
    conditions = Conditions(
        memory_bytes=_machine.free_memory_bytes(),
        disk_bytes=shutil.disk_usage(directory).free,
        device_bytes=torch.cuda.mem_get_info()[0] if device == "cuda" else None,
        seconds_per_process=_probe_seconds_per_process(device),
        seconds_per_byte=_probe_seconds_per_byte(directory),
    )
    return choose({size: final_bytes(size, torch.float32) for size in _CHOICE}, processes, conditions)


def _probe_seconds_per_byte(directory: Path) -> float:
    """Measure the time to initialize, write and read back one byte in this directory."""
    begin = time.perf_counter()
    probe = directory / "probe"
    numbers = torch.empty(_PROBE_BYTES // 4).uniform_()
    numbers.numpy().tofile(probe)
    make_cold(probe)
    torch.from_file(str(probe), size=numbers.numel(), dtype=torch.float32).clone()
    probe.unlink()
    return (time.perf_counter() - begin) / _PROBE_BYTES


def _probe_seconds_per_process(device: str) -> float:
    """Measure the time of a process that loads almost nothing: torch's import, a context and the digests."""
    begin = time.perf_counter()
    run_job(MethodJob(method=REFERENCE, model="tiny", checkpoint="", dtype="float32", device=device, verify=True))
    return time.perf_counter() - begin
