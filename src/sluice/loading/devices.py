"""The ``device`` argument of loads as names that torch writes, and the devices that ``"auto"`` chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Literal, TypeAlias

import torch

from sluice import _defaults as defaults
from sluice._arguments import device_name
from sluice._dtypes import ITEM_BYTES
from sluice._errors import BudgetError
from sluice._options import NO_LIMITS, MemoryLimits
from sluice._units import parse_bytes
from sluice.engine.accelerators import accelerators, device_facts
from sluice.entries.patterns import Placement
from sluice.matching.match import Match
from sluice.modules.collect import ModuleState, undivided
from sluice.planning.auto_placement import Member, auto_placement
from sluice.planning.budget import device_limit
from sluice.planning.cuda_allocator import scratch_bytes
from sluice.planning.threads import staging_buffer_bytes

__all__ = ["Device", "check_prefixes", "choose_placement", "other_devices", "parse_placement"]

#: Type of the ``device`` argument of ``load_into``.
Device: TypeAlias = str | int | torch.device | Mapping[str, str | int | torch.device] | None

#: Strategies of accelerate other than ``"auto"``.
_OTHER_STRATEGIES = frozenset({"balanced", "balanced_low_0", "sequential"})


def parse_placement(device: Device) -> Placement | Literal["auto"]:
    """Return devices by prefixes of names, or ``"auto"``.

    Raises:
        ValueError: A device cannot be used, or is a strategy other than ``"auto"``.
    """
    if device is None:
        return {}
    if isinstance(device, Mapping):
        return {prefix: device_name(where) for prefix, where in device.items()}
    if isinstance(device, str):
        if device == "auto":
            return "auto"
        if device in _OTHER_STRATEGIES:
            raise ValueError(f"device={device!r} is not supported: 'auto' fills accelerators in order")
    return {"": device_name(device)}


def check_prefixes(placement: Placement, state: ModuleState) -> None:
    """Refuse prefixes that name neither a module nor a tensor of the model: they would silently place nothing.

    Raises:
        ValueError: There are such prefixes.
    """
    if not placement:
        return
    known = {path for path, _ in state.module.named_modules(remove_duplicate=False)} | state.unsaved.keys()
    known.update(name for slot in state.outline.slots for name in slot.names)
    unknown = [prefix for prefix in placement if prefix not in known]
    if unknown:
        raise ValueError(f"device= names no module or tensor of the model: {', '.join(map(repr, unknown))}")


def other_devices(placement: Placement | Literal["auto"]) -> tuple[str, ...]:
    """Return other values for ``device``: the first accelerator, ``"auto"``, the CPU."""
    available = accelerators()
    offered = (available[0], "auto", "cpu") if available else ("cpu",)
    current = placement if placement == "auto" else placement.get("", "cpu")
    return tuple(device for device in offered if device != current)


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
        dict(_rooms(memory or NO_LIMITS)),
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


def _rooms(memory: MemoryLimits) -> Iterator[tuple[str, int]]:
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
        yield device, max(0, limit_bytes - scratch)
