"""What callers say of devices, as names that torch writes; and the choice of ``device="auto"``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Literal, TypeAlias

import torch

from sluice import _options as options
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
from sluice.planning.planner import staging_buffer_bytes

__all__ = ["Device", "check_prefixes", "choose_placement", "device_name", "other_devices", "parse_placement"]

#: What the ``device`` of ``load_into`` takes.
Device: TypeAlias = str | torch.device | Mapping[str, str | int | torch.device] | None

#: Strategies that accelerate has beside ``"auto"``.
_OTHER_STRATEGIES = frozenset({"balanced", "balanced_low_0", "sequential"})


def parse_placement(device: Device) -> Placement | Literal["auto"]:
    """Return devices by prefixes of names, or that they are to be chosen.

    Raises:
        ValueError: A device cannot be used, or another strategy than ``"auto"`` is asked for.
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


def device_name(device: str | int | torch.device) -> str:
    """Return a device as torch writes it, with the index that it means now; an int counts accelerators.

    Raises:
        ValueError: This torch cannot use it here, or it holds nothing: the meta device, and accelerate's ``"disk"``.
    """
    if device == "disk":
        raise ValueError(
            "device 'disk' cannot hold weights: sluice loads all of them; for weights that stay in the "
            "file until they are used, choose 'cpu' and place='map'"
        )
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA says so with an AssertionError
        raise ValueError(f"device {device!r} cannot be used: {error}") from error
    if found.type == "meta":
        raise ValueError("device='meta' cannot hold weights")
    return str(found)


def check_prefixes(placement: Placement, state: ModuleState) -> None:
    """Refuse prefixes that are no module and no tensor of the module: they would place nothing, silently.

    Raises:
        ValueError: There are such prefixes.
    """
    known = {path for path, _ in state.module.named_modules(remove_duplicate=False)} | state.unsaved.keys()
    known.update(name for slot in state.outline.slots for name in slot.names)
    unknown = [prefix for prefix in placement if prefix not in known]
    if unknown:
        raise ValueError(f"device= names no module or tensor of the model: {', '.join(map(repr, unknown))}")


def choose_placement(state: ModuleState, found: Match, memory: MemoryLimits | None) -> Placement:
    """Return where ``device="auto"`` puts each tensor.

    Args:
        state: The module.
        found: What fills it; the devices in it do not count.
        memory: ``device`` limits what each accelerator is filled with; None takes what is free, less a reserve.

    Raises:
        BudgetError: An accelerator does not say how much memory it has, and ``memory`` does not either.
    """
    return auto_placement(
        list(_members(state, found)),
        list(_rooms(memory or MemoryLimits())),
        whole=undivided(state.module),
        one_block=all(slot.on_meta for slot in state.outline.slots),
    )


def other_devices(placement: Placement | Literal["auto"]) -> tuple[str, ...]:
    """Return what a caller could give as ``device`` instead: the first accelerator, ``"auto"``, the CPU."""
    found = accelerators()
    offered = (found[0], "auto", "cpu") if found else ("cpu",)
    now = placement if placement == "auto" else placement.get("", "cpu")
    return tuple(device for device in offered if device != now)


def _members(state: ModuleState, found: Match) -> Iterator[Member]:
    filled = dict(zip(found.slots, found.requests, strict=True))
    for position, slot in enumerate(state.outline.slots):
        request = filled.get(position)
        dtype = request.dtype if request else found.initial_dtypes.get(position, slot.dtype)
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
            known = device_facts(device)
            if known.free_bytes is None:
                raise BudgetError(
                    f"device='auto' cannot tell how much {device} has free; say it with MemoryLimits(device=...)"
                )
            limit_bytes = int((known.free_bytes + known.cached_bytes) * (1 - options.AUTO_RESERVE))
        yield Room(device=device, nbytes=max(0, limit_bytes - scratch))
