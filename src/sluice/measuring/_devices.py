"""Memory held by torch's accelerator allocators; read only if torch is imported and the device is initialized."""

from __future__ import annotations

import sys
from typing import Any

from msgspec import Struct

__all__ = ["DeviceMeter"]


class _Held(Struct, frozen=True):
    allocated: int
    reserved: int


class DeviceMeter:
    """Peak and current memory of each accelerator since the construction of the meter."""

    def __init__(self) -> None:
        self._start: dict[str, _Held] = {}
        for device, module, number in _devices():
            module.reset_peak_memory_stats(number)
            self._start[device] = _Held(module.memory_allocated(number), module.memory_reserved(number))

    def allocated(self) -> dict[str, int]:
        """Return the currently allocated bytes of each device."""
        return {device: module.memory_allocated(number) for device, module, number in _devices()}

    def uuids(self) -> dict[str, str]:
        """Return the UUID of each device that has one, as NVML writes it."""
        uuids = {device: _uuid(module, number) for device, module, number in _devices()}
        return {device: uuid for device, uuid in uuids.items() if uuid}

    def growth(self) -> dict[str, tuple[int, int, int]]:
        """Return for each device the peak growth of allocated and reserved bytes, and the remaining growth.

        The growth of a device that was first used after the start is counted from 0.
        """
        growth = {}
        for device, module, number in _devices():
            start = self._start.get(device, _Held(0, 0))
            growth[device] = (
                module.max_memory_allocated(number) - start.allocated,
                module.max_memory_reserved(number) - start.reserved,
                module.memory_allocated(number) - start.allocated,
            )
        return growth


def _uuid(module: Any, number: int) -> str:
    uuid = str(getattr(module.get_device_properties(number), "uuid", ""))
    return f"GPU-{uuid}" if uuid else ""


def _devices() -> list[tuple[str, Any, int]]:
    """Return name, torch module and number of each initialized accelerator."""
    torch = sys.modules.get("torch")
    kind = None if torch is None else torch.accelerator.current_accelerator()
    if torch is None or kind is None:
        return []
    module: Any = getattr(torch, kind.type, None)
    if not hasattr(module, "max_memory_reserved") or not (module.is_available() and module.is_initialized()):
        return []
    return [(f"{kind.type}:{number}", module, number) for number in range(module.device_count())]
