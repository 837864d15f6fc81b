"""Base class of the reports of a load and of its dry run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sluice._messages import first_names, listed
from sluice._units import counted, format_bytes
from sluice.records import Peaks, RemoteReads
from sluice.reports.document import Report, checkpoint_title

__all__ = ["LoadFigures", "MergedAdapter", "Subject"]

#: The object whose tensors a load counts.
Subject: TypeAlias = Literal["model", "optimizer state", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedAdapter:
    """An adapter that a load merges into the weights it reads."""

    #: Path or address of its tensors.
    source: str
    #: Kind of adapter: ``"LoRA"``, ``"DoRA"``, ``"LoHa"``, ``"bias"``, ``"replaced"`` for whole tensors.
    kinds: tuple[str, ...]
    #: Factor that the caller gave.
    weight: float
    #: Factors of its sums, with ``weight``, each once.
    scales: tuple[float, ...]
    #: Number of changes of tensors of the model.
    tensors: int

    def describe(self) -> str:
        """Return the adapter as one line."""
        scales = f", scale {first_names([f'{scale:g}' for scale in self.scales])}" if self.scales else ""
        return f"merged {self.source}: {', '.join(self.kinds)}, {counted(self.tensors, 'change')}{scales}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures(Report):
    """A load, planned or done; names and devices are those of the model, or of the checkpoint without a model."""

    #: Path of the checkpoint, as given.
    source: str
    #: Name of its format: ``"torch-zip"``, ``"torch-legacy"``, ``"safetensors"``, ...
    format: str
    #: Paths of its files that are read.
    files: tuple[str, ...]
    #: Dotted path of the part that is loaded; None for the whole checkpoint.
    key: str | None = None
    #: Prefix that is stripped from the names of the file, such as ``"module."``; empty if there is no prefix.
    prefix: str = ""
    #: Devices of the finished tensors, as torch writes them.
    devices: tuple[str, ...]
    #: Device for each name prefix, as requested or as ``device="auto"`` chose; the longest prefix wins.
    placement: Mapping[str, str] = field(default_factory=dict)
    #: The object whose tensors ``total`` counts; ``"checkpoint"`` without a model.
    subject: Subject = "model"
    #: Number of tensors that the checkpoint fills; tied names count once.
    loaded: int
    #: Number of tensors that it could fill: parameters and persistent buffers of the model, tensors of the state of the
    #: optimizer in the checkpoint, or names of the checkpoint.
    total: int
    #: Bytes of the finished tensors that the checkpoint fills.
    loaded_bytes: int
    #: Number of finished tensors, including those that are initialised; tied names count once.
    tensors: int
    #: F: bytes of the finished tensors.
    final_bytes: int
    #: Bytes read from files.
    read_bytes: int
    #: Requests for remote files and their bytes, which stores bill, planned and made; None if no file is remote.
    remote: RemoteReads | None = None
    #: Bytes of finished tensors that are mapped pages of the files; nothing is read for them.
    mapped_bytes: int = 0
    #: Predicted growth of host memory, from the call on.
    predicted: Peaks
    #: Number of tensors for each change of dtype: ``{"float32->bfloat16": 12}``.
    cast: Mapping[str, int] = field(default_factory=dict)
    #: Names of the model that are not in the checkpoint.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that are not in the model.
    unexpected: tuple[str, ...] = ()
    #: Names of a different shape, whose values the model keeps: the shape in the model, and in the checkpoint.
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    #: Adapters that are merged, in order.
    adapters: tuple[MergedAdapter, ...] = ()
    #: Groups of names that are one tensor.
    tied: tuple[tuple[str, ...], ...] = ()
    #: Missing names that the modules' own ``reset_parameters`` fills.
    initialised: tuple[str, ...] = ()
    #: Remarks, one sentence each.
    notes: tuple[str, ...] = ()

    def title(self, verb: str) -> str:
        """Return how many of how many tensors come from the checkpoint: the first line."""
        count = f"{verb} {self.loaded:,} of {counted(self.total, 'tensor')}"
        subject = "" if self.subject == "checkpoint" else f"the {self.subject} from "
        source = checkpoint_title(self.source, self.format, self.key)
        return f"{count} of {subject}{source}, {format_bytes(self.loaded_bytes)}"

    def unmatched(self) -> Iterator[str]:
        """Yield a line for each kind of names that do not match."""
        shapes = (
            f"{name} {list(own)}, {list(saved)} in the checkpoint" for name, (own, saved) in self.mismatched.items()
        )
        labelled = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of a different shape, not loaded": tuple(shapes),
        }
        return (listed(label, names) for label, names in labelled.items() if names)
