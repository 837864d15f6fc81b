"""Plan a comparison: its model, its size on this machine, the checkpoint that each method reads, and its tables."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice._errors import UnsupportedError
from sluice._units import format_bytes
from sluice.benchmark import gpt2
from sluice.benchmark import machine as _machine
from sluice.benchmark.loads import run_job
from sluice.benchmark.machine import make_cold
from sluice.benchmark.methods import METHODS, STRATEGIES, absence, final_bytes, kind_of
from sluice.benchmark.records import REFERENCE, SHORT_DTYPES, Kind, MethodJob, ModelSource, Precision, Scenario, State

__all__ = ["ComparedModel", "can_read", "checkpoint_for", "default_methods", "fitting_size", "own_model", "scenario"]

#: Longest estimate of a comparison, including the creation of its checkpoints.
_BUDGET_SECONDS = 120.0

#: How often the bytes of the checkpoint are handled: by each process, with its preparation, and when the checkpoints
#: are made. Measured over the tutorial's methods in two precisions.
_HANDLINGS_PER_PROCESS, _HANDLINGS_AT_FIRST = 1.0, 1.75

#: Needed memory: the largest method holds 2 F (fp32), and warm runs need the file in the page cache as well.
_MEMORY_IN_FINALS, _MEMORY_BESIDE_BYTES = 3.2, 1 << 30

#: Needed disk space in F: a checkpoint in one file, and one with a file per parameter.
_DISK_IN_FINALS = 2.1

#: Size of the probe file in bytes: large enough for a disk to reach its speed.
_PROBE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel(ModelSource):
    """A model and its checkpoint."""

    #: The user's checkpoint; None for a built-in model, whose checkpoints are generated.
    original: Path | None = None
    #: Kind of the user's checkpoint.
    kind: Kind | None = None

    @property
    def title(self) -> str:
        """Name in the tables."""
        if self.original is None:
            return f"GPT-2 {self.model}, fp32 checkpoint"
        return f"{self.model} from {self.original.name or self.original}"


def own_model(original: Path, model: str, model_args: str, key: str | None) -> ComparedModel:
    """Return a user's model and checkpoint.

    Raises:
        CheckpointError: sluice does not recognize the checkpoint.
    """
    kind = kind_of(original)
    return ComparedModel(model=model, model_args=model_args, key=key, original=original, kind=kind)


def can_read(method: str, subject: ComparedModel) -> bool:
    """Return whether a method reads the checkpoint of a model; each reads a generated one."""
    chosen = METHODS[method]
    return subject.original is None or (subject.kind in chosen.reads and (chosen.takes_key or not subject.key))


def checkpoint_for(method: str, subject: ComparedModel, folder: Path) -> Path:
    """Return the checkpoint that a method reads: the original, or one in the folder, generated on first use.

    Raises:
        UnsupportedError: The method does not read the original.
        OSError: There is no room for it, with ``errno.ENOSPC``.
    """
    if not can_read(method, subject):
        advice = "Write a copy that it reads with `sluice convert`, and compare the methods with that."
        raise UnsupportedError(f"{method} does not read this checkpoint", file=str(subject.original), advice=advice)
    if subject.original is not None:
        return subject.original
    kind = METHODS[method].reads[0]
    path = folder / (f"model{kind}" if kind else "parameters")
    if not path.exists():
        nbytes, free = final_bytes(subject.model, torch.float32), shutil.disk_usage(folder).free
        if nbytes > free:
            text = f"a checkpoint of {format_bytes(nbytes)} does not fit: {format_bytes(free)} are free"
            raise OSError(errno.ENOSPC, text, str(folder))
        gpt2.write_checkpoint(gpt2.random_state_dict(subject.model, torch.float32), path)
    return path


def default_methods(subject: ComparedModel) -> list[str]:
    """Return the tutorial's methods and sluice; for a user's checkpoint, only those that can read it."""
    return [method.name for method in STRATEGIES if can_read(method.name, subject)]


def scenario(
    subject: ComparedModel,
    folder: Path,
    methods: Sequence[str],
    dtype: Precision,
    *,
    device: str,
    states: tuple[State, ...],
    host_limit_bytes: int | None = None,
) -> Scenario:
    """Return a scenario, one table: every method loads the subject into a model of this dtype.

    Raises:
        UnsupportedError: A method does not read the checkpoint.
    """
    limit = f", {host_limit_bytes / (1 << 30):.2f} GiB of host memory" if host_limit_bytes is not None else ""
    return Scenario(
        title=f"{subject.title} → {SHORT_DTYPES[dtype]}{limit}",
        model=subject.model,
        model_args=subject.model_args,
        key=subject.key,
        dtype=dtype,
        device=device,
        states=states,
        # A method that is not installed gets a row with the reason, and needs no checkpoint.
        checkpoints={name: Path() if absence(name) else checkpoint_for(name, subject, folder) for name in methods},
        final_bytes=final_bytes(subject.model, getattr(torch, dtype), subject.model_args),
        truth=subject.original,
        host_limit_bytes=host_limit_bytes,
    )


def fitting_size(folder: Path, device: str, processes: int) -> tuple[str, float]:
    """Return the largest size of GPT-2 that fits memory, disk and two minutes, and its estimate in seconds.

    The estimate is from two short probes. If no size fits, it is the smallest but that of tests.

    Args:
        folder: Directory of the checkpoints.
        device: Device of the finished models.
        processes: Number of processes of the comparison.
    """
    per_process, per_byte = _probe_process(device), _probe_byte(folder)
    memory, disk = _machine.free_memory_bytes(), shutil.disk_usage(folder).free
    room = min((memory - _MEMORY_BESIDE_BYTES) / _MEMORY_IN_FINALS, disk / _DISK_IN_FINALS)
    if device == "cuda":
        room = min(room, torch.cuda.mem_get_info()[0] / _DISK_IN_FINALS)
    for size in gpt2.SIZES[:0:-1]:
        final = final_bytes(size, torch.float32)
        handlings = _HANDLINGS_AT_FIRST + processes * _HANDLINGS_PER_PROCESS
        seconds = processes * per_process + handlings * per_byte * final
        if final <= room and seconds <= _BUDGET_SECONDS:
            break
    return size, seconds


def _probe_byte(folder: Path) -> float:
    """Measure the time to initialize, write and read back one byte in this directory."""
    begin = time.perf_counter()
    probe = folder / "probe"
    numbers = torch.empty(_PROBE_BYTES // 4).uniform_()
    numbers.numpy().tofile(probe)
    make_cold(probe)
    torch.from_file(str(probe), size=numbers.numel(), dtype=torch.float32).clone()
    probe.unlink()
    return (time.perf_counter() - begin) / _PROBE_BYTES


def _probe_process(device: str) -> float:
    """Measure the time of a process that loads almost nothing: torch's import, a context and the digests."""
    begin = time.perf_counter()
    run_job(MethodJob(method=REFERENCE, model="tiny", checkpoint="", dtype="float32", device=device, verify=True))
    return time.perf_counter() - begin
