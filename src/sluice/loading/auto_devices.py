"""The devices that ``device="auto"`` chooses for the tensors of a module."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._errors import BudgetError
from sluice._options import MemoryLimits
from sluice._units import parse_bytes
from sluice.engine.accelerators import accelerators, device_facts
from sluice.matching.match import Match
from sluice.matching.placement import Placement
from sluice.modules.collect import ModuleState, undivided
from sluice.planning.auto_placement import Member, Room, auto_placement
from sluice.planning.budget import device_limit
from sluice.planning.cuda_allocator import scratch_bytes
from sluice.planning.threads import staging_buffer_bytes

__all__ = ["choose_placement"]


def choose_placement(state: ModuleState, matched: Match, memory: MemoryLimits | None) -> Placement:
    """Return the devices that ``device="auto"`` chooses.

    Args:
        state: The module.
        matched: The match of its tensors; the devices in it are ignored.
        memory: ``device`` limits how far each accelerator is filled; None fills its free memory, less a reserve.

    Raises:
        BudgetError: The free memory of an accelerator is unknown, and ``memory`` does not limit it.
    """
    return auto_placement(
        list(_members(state, matched)),
        list(_rooms(memory or MemoryLimits())),
        whole=undivided(state.module),
        one_block=all(slot.on_meta for slot in state.outline.slots),
    )


def _members(state: ModuleState, matched: Match) -> Iterator[Member]:
    request_of = dict(zip(matched.slots, matched.requests, strict=True))
    for position, slot in enumerate(state.outline.slots):
        request = request_of.get(position)
        dtype = request.dtype if request else matched.initial_dtypes.get(position, slot.dtype)
        shape = request.entry.shape if request else slot.shape  # a lazy parameter has no shape of its own
        stays = not slot.on_meta and slot.dtype == dtype
        yield Member(names=slot.names, nbytes=prod(shape) * ITEM_BYTES[dtype], at=slot.device if stays else None)
    for name, holdings in state.unsaved.items():
        tensor = holdings[0].tensor
        yield Member(names=(name,), nbytes=tensor.nbytes, at=str(tensor.device))


def _rooms(memory: MemoryLimits) -> Iterator[Room]:
    scratch = scratch_bytes(staging_buffer_bytes(parse_bytes(memory.staging)))
    for device in accelerators():
        limit_bytes = device_limit(memory, device)
        if limit_bytes is None:
            facts = device_facts(device)
            if facts.free_bytes is None:
                raise BudgetError(
                    f"device='auto': the free memory of {device} is unknown; set it with MemoryLimits(device=...)"
                )
            limit_bytes = int((facts.free_bytes + facts.cached_bytes) * (1 - defaults.AUTO_RESERVE))
        yield Room(device=device, nbytes=max(0, limit_bytes - scratch))
