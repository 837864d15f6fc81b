"""Decisions for models whose tensors are divided over ranks (DTensors): devices, and copies made after the load."""

from __future__ import annotations

from collections.abc import Iterator

from sluice._dtypes import ITEM_BYTES
from sluice._errors import MismatchError
from sluice.matching.match import Match
from sluice.modules.collect import ModuleState
from sluice.sharding.dtensors import home

__all__ = ["check_devices", "padding_copies"]


def check_devices(state: ModuleState, matched: Match) -> None:
    """Refuse devices on which the mesh of a DTensor could not use it.

    Raises:
        MismatchError: There are such tensors.
    """
    for slot, request in zip(matched.slots, matched.requests, strict=True):
        if state.outline.slots[slot].region is None:
            continue
        own = home(state.tensors[slot])
        if request.device not in {own, "cpu"}:
            raise MismatchError(
                f"{request.name!r} is divided over a mesh whose part for this rank is on {own}, not on "
                f"{request.device}: call load_into without device=",
                tensor=request.name,
            )


def padding_copies(state: ModuleState, matched: Match) -> Iterator[tuple[int, int]]:
    """Yield the bytes of local tensors that fully_shard copies after the load, and of their copies."""
    for slot, request in zip(matched.slots, matched.requests, strict=True):
        shard = state.shards.get(slot)
        if shard is None or request.existing or request.device != "cpu":
            continue
        nbytes, padded = (n * ITEM_BYTES[request.dtype] for n in (request.entry.numel, shard.elements))
        if shard.pinned:
            yield nbytes, 1 << max(padded - 1, 0).bit_length()  # torch rounds page-locked memory up to a power of two
        elif padded != nbytes:
            yield nbytes, padded
