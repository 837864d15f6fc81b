"""The ``device`` argument of loads as names that torch writes; ``auto_devices`` chooses for ``device="auto"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch

from sluice._arguments import device_name
from sluice.engine.accelerators import accelerators
from sluice.matching.placement import Placement
from sluice.modules.collect import ModuleState

__all__ = ["Device", "check_prefixes", "other_devices", "parse_placement"]

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
