"""Open a checkpoint with merged adapters: tensors that they change are computed when they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice._defaults import SCAN_STAGING_BYTES
from sluice._dtypes import ITEM_BYTES
from sluice._options import MemoryLimits
from sluice.adapters.config import Adapter
from sluice.adapters.merging import MergeStep, merge
from sluice.adapters.steps import AdapterFile, BaseWeight, steps_of
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.matching.match import Match
from sluice.matching.name_fit import unwrap
from sluice.modules.collect import ModuleState
from sluice.reading.composites import read_tensor
from sluice.reading.computed import WholeTensor, WholeTensors
from sluice.records import Entry
from sluice.reports.load import MergedAdapter
from sluice.sharding.dtensors import is_dtensor

__all__ = ["AdaptedCheckpoint", "adapted", "open_adapted"]

#: Tensors of the size of the weight that a kind holds at a time, if more than one.
_SUMS = {"DoRA": 3, "LoHa": 2, "LoKr": 2}


class AdaptedCheckpoint(Struct, frozen=True, kw_only=True):
    """A checkpoint with merged adapters."""

    #: The base checkpoint, with one more file.
    checkpoint: OpenCheckpoint
    #: Entries of the tensors that change, by their first names.
    entries: Mapping[str, Entry]
    #: Records of the adapters, in order.
    adapters: tuple[MergedAdapter, ...]


#: A tensor that adapters change, and how, in order.
_Changed: TypeAlias = "tuple[BaseWeight, Entry, list[tuple[AdapterFile, MergeStep]]]"


def open_adapted(
    checkpoint: OpenCheckpoint, weights: Sequence[BaseWeight], adapters: Sequence[Adapter]
) -> AdaptedCheckpoint:
    """Return a checkpoint with merged adapters, of which names and scales are read; it needs no closing.

    Raises:
        MismatchError: A tensor of an adapter fits no weight.
        UnsupportedError: An adapter is of a kind that is not merged.
    """
    names = {name: weight for weight in weights for name in weight.names}
    bare = {unwrap(name): weight for name, weight in names.items()}
    if len(bare) == len(names):
        names = bare | names
    found: dict[str, list[tuple[AdapterFile, MergeStep]]] = {}
    files, records = [AdapterFile(adapter, checkpoint.limits) for adapter in adapters], []
    for file in files:
        changes = list(steps_of(file, names))
        for weight, step in changes:
            found.setdefault(weight.names[0], []).append((file, step))
        records.append(_record(file, [step for _, step in changes]))
    tensors = [
        (weight, weight.entry, found[weight.names[0]])
        for weight in weights
        if weight.names[0] in found and weight.entry is not None
    ]
    computed = [
        WholeTensor(f"adapted.{number}", weight.dtype, entry, partial(_merged, checkpoint, (weight, entry, steps)))
        for number, (weight, entry, steps) in enumerate(tensors)
    ]
    source = WholeTensors(files[0].path, checkpoint, computed)
    source.working_bytes = sum(file.nbytes for file in files) + max(map(_working_bytes, tensors)) + SCAN_STAGING_BYTES
    joined, entries = source.added_to(checkpoint)
    return AdaptedCheckpoint(
        checkpoint=joined,
        entries={weight.names[0]: entry for (weight, _, _), entry in zip(tensors, entries, strict=True)},
        adapters=tuple(records),
    )


def _merged(base: OpenCheckpoint, tensor: _Changed) -> torch.Tensor:
    """Return a whole tensor with its adapters: pieces of a product may differ from the whole in their last bits."""
    weight, entry, steps = tensor
    memory = MemoryLimits(staging=SCAN_STAGING_BYTES)
    # Norms of a transposed tensor differ in their last bits.
    whole = read_tensor(base, weight.names[0], entry, dtype=weight.dtype, memory=memory).contiguous()
    for file, step in steps:
        merge(whole, step, file.take(step.parts))
    return whole


def _working_bytes(tensor: _Changed) -> int:
    """Return the host memory for one weight and its sums."""
    weight, entry, steps = tensor
    sums = max((_SUMS.get(step.kind, 1) for _, step in steps if step.kind != "bias"), default=0)
    item = ITEM_BYTES[weight.dtype]
    return entry.numel * (item + sums * max(4, item))


def _record(file: AdapterFile, steps: Sequence[MergeStep]) -> MergedAdapter:
    return MergedAdapter(
        source=file.path,
        kinds=tuple(dict.fromkeys(step.kind for step in steps)),
        weight=file.adapter.weight,
        scales=tuple(sorted({step.scale for step in steps if step.kind != "replaced"})),
        tensors=len(steps),
    )


def adapted(
    checkpoint: OpenCheckpoint, state: ModuleState, matched: Match, adapters: Sequence[Adapter]
) -> tuple[AdaptedCheckpoint, Match]:
    """Return the checkpoint with merged adapters, and the match that reads it; errors are those of ``open_adapted``."""
    requests, weights = dict(zip(matched.slots, matched.requests, strict=True)), []
    for slot, one in enumerate(state.outline.slots):
        request = requests.get(slot)
        shared = is_dtensor(state.tensors[slot]) or slot in state.aliases
        weights.append(
            BaseWeight(
                names=one.names,
                shape=tuple(one.shape),
                entry=None if request is None else request.entry,
                dtype="" if request is None else request.dtype,
                transposed=any(type(owner.module).__name__ == "Conv1D" for owner in state.owners[slot]),
                problem="is a DTensor, or shares its memory with another tensor" if shared else "",
            )
        )
    merged = open_adapted(checkpoint, weights, adapters)
    firsts = [state.outline.slots[slot].names[0] for slot in matched.slots]
    changed = (
        replace(request, entry=merged.entries.get(first, request.entry))
        for first, request in zip(firsts, matched.requests, strict=True)
    )
    return merged, replace(matched, requests=tuple(changed))
