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
    "OTHER",
    "PARAMETERS",
    "PTH",
    "REFERENCE",
    "SAFETENSORS",
    "SHARDS",
    "SHORT_DTYPES",
    "TENSORS",
    "Kind",
    "Loaded",
    "Method",
    "MethodJob",
    "Outcome",
    "Precision",
    "Run",
    "Scenario",
    "Start",
    "State",
    "Status",
    "Trace",
    "Verdict",
]

#: The method whose verdict is the truth, where a scenario names no other.
REFERENCE = "reference"

#: What a checkpoint is to the methods that read it: the ending of a file, or what a directory holds.
Kind = str

PTH: Kind = ".pth"
SAFETENSORS: Kind = ".safetensors"
#: tensorizer's own format.
TENSORS: Kind = ".tensors"
#: A directory with a ``torch.save`` file for each parameter.
PARAMETERS: Kind = ""
#: A directory with parts of one state dict, as Hugging Face writes them.
SHARDS: Kind = "shards"
#: What only sluice reads.
OTHER: Kind = "other"

#: ``cold``: nothing of the checkpoint is in the page cache. ``warm``: all of it is.
#: ``first``, ``second``, ``third``: loads of the same file one after another, the first of them cold.
State = Literal["cold", "warm", "first", "second", "third"]

#: Dtype of a finished model.
Precision = Literal["float32", "bfloat16", "float16"]

#: What tables call them.
SHORT_DTYPES: dict[Precision, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

#: ``killed``: a signal ended the process, as the kernel does when memory runs out. ``failed``: an exception did.
#: ``absent``: the package that does the work is not installed.
Status = Literal["ok", "killed", "failed", "timeout", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodJob:
    """What one fresh process is asked to do."""

    #: Name of the method in the registry.
    method: str
    #: Name of a built-in model, for ``gpt2.build``, or ``package.module:name`` of what builds one.
    model: str
    #: Arguments of what builds the model, as JSON: an object by name, an array in order.
    model_args: str = "{}"
    #: The checkpoint: a file, or for ``per-parameter`` a directory.
    checkpoint: str
    #: Dotted path of the weights in the checkpoint; None where it holds nothing else.
    key: str | None = None
    #: Dtype of the floating-point tensors of the finished model.
    dtype: Precision
    #: Device of the finished model: ``"cpu"`` or ``"cuda"``.
    device: str
    #: What torch's allocator may take of the device, in bytes; None for all of it.
    device_limit_bytes: int | None = None
    #: Whether to compute the digests of the finished model, after the measurement.
    verify: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch's object."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


#: What a method leaves behind: a model, or the memory that a raw read filled.
Loaded = nn.Module | mmap.mmap

#: Does what is not timed, such as building the model on the meta device, and returns the rest.
Start = Callable[[MethodJob], Callable[[], Loaded]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to load weights."""

    #: Name in the registry, in tables and on the command line.
    name: str
    #: What the child process calls.
    start: Start
    #: What to import before the clock starts: ``"package.module"`` or ``"package.module:name"``.
    imports: tuple[str, ...] = ()
    #: The checkpoints that it reads, the one that suits it best first.
    reads: tuple[Kind, ...]
    #: One line on what it does; empty where no page shows it.
    summary: str = ""
    #: Name on PyPI of what has to be installed for it; empty for nothing.
    package: str = ""
    #: Whether it can take weights from below a key of a larger object.
    takes_key: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a finished model is, in a form that two processes can compare."""

    #: SHA-256 over name, dtype, shape and the sum of all elements' bit patterns of every tensor.
    weights: str
    #: Every n-th of the logits on a fixed input, about 500 of them; of a model that is not built in, none.
    logits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Memory of one process while it loaded, as growth in bytes; all columns have one length."""

    #: Since the load began, in seconds.
    seconds: tuple[float, ...]
    #: Private anonymous memory.
    anon: tuple[int, ...]
    #: Mapped file pages.
    file: tuple[int, ...]
    #: Shared memory.
    shmem: tuple[int, ...]
    #: What all processes use of the accelerator; empty without one.
    device: tuple[int, ...] = ()

    def total(self) -> tuple[int, ...]:
        """Return the resident memory of each moment: all kinds together."""
        return tuple(map(sum, zip(self.anon, self.file, self.shmem, strict=True)))


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
    #: Memory over time; None where the process never came to load.
    trace: Trace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Methods that do the same work on the same bytes, and so share one table."""

    #: Heading of its table.
    title: str
    #: As in ``MethodJob``.
    model: str
    #: As in ``MethodJob``.
    model_args: str = "{}"
    #: As in ``MethodJob``; it is that of ``truth``, copies made for a method hold nothing but weights.
    key: str | None = None
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
    #: What the truth is read from; None where it is computed, as that of built-in models is.
    truth: Path | None = None
    #: Host memory that each process may use, interpreter included, in bytes; None without a limit.
    host_limit_bytes: int | None = None
    #: As in ``MethodJob``.
    device_limit_bytes: int | None = None

    @property
    def short_dtype(self) -> str:
        """``dtype`` as tables write it."""
        return SHORT_DTYPES[self.dtype]

    @property
    def builtin(self) -> bool:
        """Whether the model is one of ``gpt2``, whose logits can be compared."""
        return ":" not in self.model


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
