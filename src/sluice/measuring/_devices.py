"""Memory held by torch's accelerator allocators; read only if torch is imported and the device is initialized."""

from __future__ import annotations

import sys
from typing import Any

from sluice.measuring._report import DeviceReport

__all__ = ["DeviceMeter"]


class DeviceMeter:
    """Peak and current memory of each accelerator since the construction of the meter."""

    def __init__(self) -> None:
        self._start: dict[str, tuple[int, int]] = {}
        for device, module, number in _devices():
            module.reset_peak_memory_stats(number)
            self._start[device] = module.memory_allocated(number), module.memory_reserved(number)

    def allocated(self) -> dict[str, int]:
        """Return the currently allocated bytes of each device."""
        return {device: module.memory_allocated(number) for device, module, number in _devices()}

    def growth(self) -> tuple[DeviceReport, ...]:
        """Return the growth of each device; of one that was first used after the start, from 0."""
        return tuple(self._growth(*each) for each in _devices())

    def _growth(self, device: str, module: Any, number: int) -> DeviceReport:
        allocated, reserved = self._start.get(device, (0, 0))
        return DeviceReport(
            device=device,
            allocated_bytes=module.max_memory_allocated(number) - allocated,
            reserved_bytes=module.max_memory_reserved(number) - reserved,
            final_bytes=module.memory_allocated(number) - allocated,
        )


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
