"""Plan a comparison: its subject, the checkpoint that each method reads, and its tables."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice._errors import UnsupportedError
from sluice._units import format_bytes
from sluice.benchmark import subjects as _subjects
from sluice.benchmark.gpt2 import final_bytes, make_checkpoint
from sluice.benchmark.methods import METHODS, absence
from sluice.benchmark.records import (
    OTHER,
    PARAMETERS,
    SHORT_DTYPES,
    Kind,
    Precision,
    Scenario,
    State,
)
from sluice.benchmark.strategies import STRATEGIES
from sluice.benchmark.writing import FORMATS, write_checkpoint

__all__ = ["Checkpoints", "ComparedModel", "builtin_subject", "default_methods", "own_subject", "scenario"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """A model and its checkpoint."""

    #: As in ``MethodJob``.
    model: str
    model_args: str = "{}"
    key: str | None = None
    #: Name in the tables.
    title: str
    #: The user's checkpoint; None for a built-in model, whose checkpoints are generated.
    original: Path | None = None
    #: Kind of the user's checkpoint.
    kind: Kind | None = None


def builtin_subject(size: str) -> ComparedModel:
    """Return a GPT-2 of a built-in size, whose checkpoints are generated in fp32."""
    return ComparedModel(model=size, title=f"GPT-2 {size}, fp32 checkpoint")


def own_subject(original: Path, model: str, model_args: str, key: str | None) -> ComparedModel:
    """Return a user's model and checkpoint.

    Raises:
        CheckpointError: sluice does not recognize the checkpoint.
    """
    return ComparedModel(
        model=model,
        model_args=model_args,
        key=key,
        title=f"{model} from {original.name or original}",
        original=original,
        kind=_subjects.kind_of(original),
    )


class Checkpoints:
    """The checkpoints of a subject: the original, and copies in the formats of methods that cannot read it.

    Args:
        subject: Model and checkpoint.
        folder: Directory for the copies.
    """

    def __init__(self, subject: ComparedModel, folder: Path) -> None:
        self._subject = subject
        self._folder = folder

    def path_for(self, method: str) -> Path:
        """Return a checkpoint that a method reads; it is created on first use.

        Raises:
            UnsupportedError: None can be created.
            OSError: There is no room for it, with ``errno.ENOSPC``.
        """
        subject, reads = self._subject, METHODS[method].reads
        # Methods without keys get a copy with the weights only.
        if subject.original is not None and subject.kind in reads and (METHODS[method].takes_key or not subject.key):
            return subject.original
        kind = reads[0]
        path = self._folder / (f"model{kind}" if kind else "parameters")
        if not path.exists():
            self._make(path, kind)
        return path

    def _make(self, path: Path, kind: Kind) -> None:
        subject = self._subject
        if subject.original is None:
            _check_room(self._folder, final_bytes(subject.model, torch.float32))
            make_checkpoint(path, subject.model, torch.float32, FORMATS[kind])
            return
        if subject.kind == OTHER:
            raise UnsupportedError(
                "cannot convert: neither torch nor safetensors reads this checkpoint", file=str(subject.original)
            )
        state_dict = _subjects.read_state_dict(subject.original, subject.key, device="cpu", mapped=True)
        tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
        _check_room(self._folder, sum(value.nbytes for value in tensors.values()))
        if kind == PARAMETERS:
            for name, value in tensors.items():  # one at a time, to save memory
                write_checkpoint({name: value.clone()}, path, FORMATS[kind])
            return
        # Copies: safetensors refuses tensors that share memory, and torch would save the whole storage of each view.
        copies = {name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
        write_checkpoint(copies, path, FORMATS[kind])


def _check_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        text = f"a checkpoint of {format_bytes(nbytes)} does not fit: {format_bytes(free)} are free"
        raise OSError(errno.ENOSPC, text, str(folder))


def default_methods(subject: ComparedModel) -> list[str]:
    """Return the tutorial's methods and sluice; for a user's checkpoint, only those that can read it."""
    return [method.name for method in STRATEGIES if subject.original is None or subject.kind in method.reads]


def scenario(
    subject: ComparedModel,
    checkpoints: Checkpoints,
    methods: Sequence[str],
    dtype: Precision,
    *,
    device: str,
    states: tuple[State, ...],
    host_limit_bytes: int | None = None,
    device_limit_bytes: int | None = None,
) -> Scenario:
    """Return a scenario, one table: every method loads the subject into a model of this dtype.

    Raises:
        UnsupportedError: No checkpoint can be created for a method.
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
        checkpoints={method: Path() if absence(method) else checkpoints.path_for(method) for method in methods},
        final_bytes=_subjects.final_bytes(subject.model, subject.model_args, getattr(torch, dtype)),
        truth=subject.original,
        host_limit_bytes=host_limit_bytes,
        device_limit_bytes=device_limit_bytes,
    )
