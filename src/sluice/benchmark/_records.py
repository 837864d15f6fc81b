"""The frozen records that the parts of the benchmarks exchange, and what a method is."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

__all__ = [
    "REFERENCE",
    "Job",
    "Loaded",
    "Method",
    "Outcome",
    "Precision",
    "Run",
    "Scenario",
    "Start",
    "State",
    "Status",
    "Verdict",
]

#: The method whose verdict is the truth, where a scenario names no other.
REFERENCE = "reference"

#: ``cold``: nothing of the checkpoint is in the page cache. ``warm``: all of it is.
#: ``first``, ``second``, ``third``: loads of the same file one after another, the first of them cold.
State = Literal["cold", "warm", "first", "second", "third"]

#: Dtype of a finished model.
Precision = Literal["float32", "bfloat16"]

#: ``killed``: a signal ended the process, as the kernel does when memory runs out. ``failed``: an exception did.
#: ``absent``: the package that does the work is not installed.
Status = Literal["ok", "killed", "failed", "timeout", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one fresh process is asked to do."""

    #: Name of the method in the registry.
    method: str
    #: Name of the model, for ``sluice.benchmark.gpt2.build``.
    model: str
    #: The checkpoint: a file, or for ``per-parameter`` a directory.
    checkpoint: str
    #: Dtype of the finished model: ``"float32"`` or ``"bfloat16"``. The checkpoint is fp32.
    dtype: Precision
    #: Device of the finished model: ``"cpu"`` or ``"cuda"``.
    device: str
    #: Whether to compute the digests of the finished model, after the measurement.
    verify: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch's object."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32


#: What a method leaves behind: a model, or the memory that a raw read filled.
Loaded = nn.Module | mmap.mmap

#: Does what is not timed, such as building the model on the meta device, and returns the rest.
Start = Callable[[Job], Callable[[], Loaded]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to load weights."""

    #: Name in the registry, in tables and on the command line.
    name: str
    #: What the child process calls.
    start: Start
    #: What to import before the clock starts: ``"package.module"`` or ``"package.module:name"``.
    imports: tuple[str, ...] = ()
    #: Endings of the checkpoints that it reads.
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a finished model is, in a form that two processes can compare."""

    #: SHA-256 over name, dtype, shape and the sum of all elements' bit patterns of every tensor.
    weights: str
    #: Every n-th of the logits on a fixed input, about 500 of them.
    logits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one process. Memory is growth over the moment when imports and context were done, in bytes."""

    #: How it ended.
    status: Status
    #: Why it did not end well; empty when it did.
    reason: str = ""
    #: From the call until every weight was touched, in seconds.
    seconds: float = 0.0
    #: Peak of private anonymous memory.
    anon_bytes: int = 0
    #: Peak of mapped file pages.
    file_bytes: int = 0
    #: Peak of shared memory.
    shmem_bytes: int = 0
    #: Peak of the three together.
    total_bytes: int = 0
    #: Peak of memory allocated on the accelerator; 0 without one.
    device_allocated_bytes: int = 0
    #: Peak of memory that the allocator reserved on the accelerator; 0 without one.
    device_reserved_bytes: int = 0
    #: The finished model, where the job asked for it.
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Methods that do the same work on the same bytes, and so share one table."""

    #: Heading of its table.
    title: str
    #: Name of the model, for ``sluice.benchmark.gpt2.build``.
    model: str
    #: Dtype of the finished model.
    dtype: Precision
    #: Device of the finished model.
    device: str
    #: The columns of seconds.
    states: tuple[State, ...]
    #: Which checkpoint each method reads, in the order of the table.
    checkpoints: dict[str, Path]
    #: F: bytes of the finished tensors.
    final_bytes: int
    #: The method whose verdict is the truth.
    reference: str = REFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process of one scenario."""

    #: Title of the scenario.
    scenario: str
    #: Name of the method.
    method: str
    #: State of the page cache.
    state: State
    #: Counts from 0.
    repetition: int
    #: What became of it.
    outcome: Outcome
