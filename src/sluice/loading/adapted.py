"""Loads that merge adapters: the weights of a module, and the requests that read changed ones."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sluice.adapters.config import Adapter
from sluice.adapters.opening import AdaptedCheckpoint, open_adapted
from sluice.adapters.steps import BaseWeight
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.matching.match import Match
from sluice.modules.collect import ModuleState
from sluice.sharding.dtensors import is_dtensor

__all__ = ["adapted"]


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
