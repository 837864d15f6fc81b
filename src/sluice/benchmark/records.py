"""Frozen records of the benchmarks: methods, jobs, scenarios and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
    "BenchTask",
    "Kind",
    "Method",
    "MethodJob",
    "MethodRun",
    "ModelSource",
    "Outcome",
    "Precision",
    "Scenario",
    "State",
    "Status",
    "Trace",
    "Work",
    "method",
]

#: Method whose verdict is the reference.
REFERENCE = "reference"

#: Kind of a checkpoint, which decides which methods read it: the suffix of a file, or the layout of a directory.
Kind = str

PTH: Kind = ".pth"
SAFETENSORS: Kind = ".safetensors"
#: A directory with a ``torch.save`` file for each parameter.
PARAMETERS: Kind = ""
#: A directory with shards of one state dict, as Hugging Face writes them.
SHARDS: Kind = "shards"
#: A checkpoint that only sluice reads.
OTHER: Kind = "other"

#: State of the page cache. ``cold``: the checkpoint is not cached. ``warm``: all of it is cached.
State = Literal["cold", "warm"]

#: Dtype of a finished model.
Precision = Literal["float32", "bfloat16", "float16"]

#: Names of the dtypes in tables.
SHORT_DTYPES: dict[Precision, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

#: ``killed``: a signal ended the process, for example because memory ran out. ``failed``: an exception did.
#: ``absent``: the package of the method is not installed. ``skipped``: the time of the whole comparison was up.
Status = Literal["ok", "killed", "failed", "timeout", "absent", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model, and the place of its weights in a checkpoint."""

    #: Name of a built-in model, for ``gpt2.gpt2``, or ``package.module:name`` of a callable that builds a model.
    model: str
    #: Arguments of that callable as JSON: an object of keyword arguments or an array of positional ones.
    model_args: str = "{}"
    #: Dotted path of the weights in the checkpoint; None if it contains nothing else.
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodJob(ModelSource):
    """The work of one benchmark process."""

    #: Name of the method in the registry.
    method: str
    #: The checkpoint file or directory.
    checkpoint: str
    #: Dtype of the floating-point tensors of the finished model.
    dtype: Precision
    #: Device of the finished model: ``"cpu"``, ``"cuda"``, or a simulated device.
    device: str
    #: Whether to compute the digest of the finished model, after the measurement.
    verify: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch's object."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


#: Result of the function of a ``BenchTask``.
Work = Generator[None, None, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to load weights."""

    #: Name in the registry, in tables and on the command line.
    name: str
    #: Builds an empty model before the clock starts; None for a method whose time includes the construction.
    build: Callable[[MethodJob], nn.Module] | None = None
    #: The timed work: takes the job, and the empty model if there is one.
    load: Callable[..., object]
    #: Imports before the clock starts: ``"package.module"`` or ``"package.module:name"``.
    imports: tuple[str, ...] = ()
    #: Kinds of checkpoints that it reads, the preferred one first.
    reads: tuple[Kind, ...]
    #: Whether it can load weights at a key of a larger object.
    takes_key: bool = False

    @property
    def summary(self) -> str:
        """One-line description."""
        return (self.load.__doc__ or "").strip().partition("\n")[0]

    def start(self, job: MethodJob) -> Callable[[], object]:
        """Do the untimed work, such as building the model on the meta device, and return the timed work."""
        return partial(self.load, job) if self.build is None else partial(self.load, job, self.build(job))


def method(name: str, **fields: Any) -> Callable[[Callable[..., object]], Method]:
    """Return a decorator that makes a ``Method`` with this name of the function that is its timed work."""
    return lambda load: Method(name=name, load=load, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Growth of the memory of one process over time, in bytes; all columns have the same length."""

    #: Time since the load began, in seconds.
    seconds: tuple[float, ...]
    #: Private anonymous memory, mapped file pages, shared memory.
    anon: tuple[int, ...]
    file: tuple[int, ...]
    shmem: tuple[int, ...]
    #: Accelerator memory used by all processes; empty without an accelerator.
    device: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTask:
    """The work of one measured process, for ``sluice bench`` and every benchmark of ``bench/``.

    ``work`` is a generator function. Its code before the first ``yield`` prepares (imports, contexts) and is not
    measured; memory counts from there on; the code between the second and the third is timed; what it returns, plain
    values, becomes ``Outcome.facts``. An ``ImportError`` while it prepares makes the outcome ``absent``.
    """

    #: ``package.module:name`` of the generator function.
    work: str
    #: Its keyword arguments: plain values.
    arguments: dict[str, Any]
    #: Imports whose time is measured before anything else of sluice is imported.
    imports: tuple[str, ...] = ()
    #: Memory to touch and free before the measurement, in bytes; see ``child``.
    claimed_bytes: int = 0
    #: When that may begin, by ``time.monotonic``.
    claim_time: float = 0.0
    #: Interval between two samples of its memory, in seconds.
    sample_seconds: float = 0.002
    #: Whether to sample the memory of the CUDA device.
    watches_device: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one process. Memory is growth since imports and context creation were done, in bytes."""

    #: How it ended.
    status: Status
    #: Reason of a failure; empty for ``ok``.
    reason: str = ""
    #: Time from the call until every weight was touched, in seconds.
    seconds: float = 0.0
    #: Processor time of the load by all threads, user and system, in seconds.
    cpu_seconds: float = 0.0
    #: Seconds to import what the method needs after torch was imported, and to build the empty model.
    import_seconds: float = 0.0
    build_seconds: float = 0.0
    #: Peaks of private anonymous memory, of mapped file pages, of shared memory, and of their sum.
    anon_bytes: int = 0
    file_bytes: int = 0
    shmem_bytes: int = 0
    total_bytes: int = 0
    #: Peaks of allocated and of reserved accelerator memory; 0 without an accelerator.
    device_allocated_bytes: int = 0
    device_reserved_bytes: int = 0
    #: Digest of the finished model; None unless the job requested it.
    verdict: str | None = None
    #: Memory over time; None if the load did not begin.
    trace: Trace | None = None
    #: Values that the work returned.
    facts: dict[str, Any] = field(default_factory=dict)
    #: Peak memory of its control group, file pages included; 0 without a limit.
    group_bytes: int = 0

    @property
    def everything_seconds(self) -> float:
        """Time of imports, building, loading and touching, in seconds."""
        return self.import_seconds + self.build_seconds + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(ModelSource):
    """Methods that do the same work on the same bytes: one table."""

    #: Heading of its table.
    title: str
    #: Dtype and device of the finished model.
    dtype: Precision
    device: str
    #: States of the page cache, a column each.
    states: tuple[State, ...]
    #: Checkpoint of each method, in the order of the table.
    checkpoints: dict[str, Path]
    #: F: bytes of the finished tensors.
    final_bytes: int
    #: Checkpoint that the reference is read from; None if it is computed, as for built-in models.
    truth: Path | None = None
    #: Limit of each process's host memory, interpreter included, in bytes; None for none.
    host_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRun:
    """One process of one scenario."""

    #: Title of the scenario, name of the method, state of the page cache, number of the repetition from 0.
    scenario: str
    method: str
    state: State
    repetition: int
    outcome: Outcome
