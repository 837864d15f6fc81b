"""What to compare on this machine when nobody says: the size of GPT-2, and whether cold loads fit the time too."""

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
from sluice.benchmark.process import run_job
from sluice.benchmark.records import MethodJob, State
from sluice.benchmark.runner import REFERENCE

__all__ = ["Choice", "Conditions", "choose", "choose_here"]

#: Sizes to choose from: the tiny one only tries the benchmark itself.
_CHOICE = SIZES[1:]

#: A comparison should be over in about two minutes, its checkpoints included.
_BUDGET_SECONDS = 120.0

#: How often a process together with its preparation handles the bytes of the checkpoint, about. Measured over the
#: tutorial's methods in two precisions: from 0.8 to 2.3, the more the busier the machine. With 1.0 a quiet one took
#: 104 s where 108 s were foretold.
_HANDLINGS_PER_PROCESS = 1.0

#: The same for making the two checkpoints.
_HANDLINGS_AT_FIRST = 1.75

#: The hungriest strategy holds 2 F (fp32), and the cached rows need the file in the page cache beside it.
_MEMORY_IN_FINALS = 3.2
_MEMORY_BESIDE_BYTES = 1 << 30

#: One checkpoint in one file, one in a file for every parameter.
_DISK_IN_FINALS = 2.1

#: Bytes of the probe file: long enough for a disk to reach its speed.
_PROBE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a machine has room and time for."""

    #: Free host memory.
    memory_bytes: int
    #: Free disk space.
    disk_bytes: int
    #: Free memory of the accelerator; None without one.
    device_bytes: int | None = None
    #: What a process costs beside its load, from a probe.
    seconds_per_process: float
    #: What initialising, writing and reading a byte takes, from a probe.
    seconds_per_byte: float

    def has_room(self, final: int) -> bool:
        """Return whether memory and disk suffice for a model of this many bytes in fp32."""
        return (
            _MEMORY_IN_FINALS * final + _MEMORY_BESIDE_BYTES <= self.memory_bytes
            and _DISK_IN_FINALS * final <= self.disk_bytes
            and (self.device_bytes is None or _DISK_IN_FINALS * final <= self.device_bytes)
        )

    def seconds(self, final: int, processes: int) -> float:
        """Return what making the checkpoints and running so many processes will take, about."""
        handled = self.seconds_per_byte * final
        return _HANDLINGS_AT_FIRST * handled + processes * (self.seconds_per_process + _HANDLINGS_PER_PROCESS * handled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What will be compared."""

    #: One of ``gpt2.SIZES``.
    size: str
    #: States of the page cache.
    states: tuple[State, ...]
    #: What that will take, about.
    seconds: float
    #: Why nothing larger, for people.
    reason: str


def choose(finals: Mapping[str, int], processes: Mapping[tuple[State, ...], int], conditions: Conditions) -> Choice:
    """Return the largest size that memory, disk and two minutes allow, and as many states as still fit then.

    The smallest size, with the fewest states, is chosen where even that takes too long or has too little room.

    Args:
        finals: F of each size in fp32, the smallest first.
        processes: How many will be run for each choice of states, the most first.
        conditions: The machine.
    """
    fewest = min(processes.values())
    roomy = {size: conditions.seconds(final, fewest) for size, final in finals.items() if conditions.has_room(final)}
    quick = [size for size, seconds in roomy.items() if seconds <= _BUDGET_SECONDS]
    size = quick[-1] if quick else next(iter(finals))
    took = {states: conditions.seconds(finals[size], count) for states, count in processes.items()}
    states = next((states for states, seconds in took.items() if seconds <= _BUDGET_SECONDS), list(took)[-1])
    larger = next((other for other in finals if finals[other] > finals[size]), None)
    return Choice(size=size, states=states, seconds=took[states], reason=_reason(larger, roomy))


def _reason(larger: str | None, roomy: Mapping[str, float]) -> str:
    if larger is None:
        return "it is the largest there is"
    if larger not in roomy:
        return f"there is too little memory or disk for GPT-2 {larger}"
    return f"GPT-2 {larger} would take about {roomy[larger]:.0f} s"


def choose_here(directory: Path, device: str, processes: Mapping[tuple[State, ...], int]) -> Choice:
    """Return what can be compared here in about two minutes, from two short probes.

    Args:
        directory: Where the checkpoints will be.
        device: Where the finished models will be.
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
    run_job(MethodJob(method=REFERENCE, model="tiny", checkpoint="", dtype="float32", device=device, verify=True))
    return time.perf_counter() - begin
