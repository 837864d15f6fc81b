"""Arguments of ``Tensor.to`` and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sluice.modules.histories import Histories

__all__ = ["destination"]


def destination(
    histories: Histories, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, torch.memory_format | None]:
    """Return device, dtype and memory format that ``to``, ``cpu``, ``cuda`` or ``xpu`` asks for."""
    layout = options.get("memory_format")
    if func != torch.Tensor.to:
        name = func.__name__
        device = args[0] if args else options.get("device")
        if isinstance(device, int):
            device = torch.device(name, device)
        return _indexed(torch.device(device or name)), None, layout
    other = args[0] if args else options.get("other")
    if isinstance(other, torch.Tensor):
        history = histories.of(other)
        return other.device if history is None else history.device, other.dtype, layout
    device, dtype, *_ = torch._C._nn._parse_to(*args, **{k: v for k, v in options.items() if k != "copy"})  # noqa: SLF001  as Module.to does
    return None if device is None else _indexed(device), dtype, layout


def _indexed(device: torch.device) -> torch.device:
    """Return the device with the index that a tensor on it would show."""
    if device.index is not None or device.type in {"cpu", "meta"}:
        return torch.device(device.type) if device.type == "cpu" else device
    module = getattr(torch, device.type, None)
    available = module is not None and hasattr(module, "is_available") and module.is_available()
    return torch.device(device.type, module.current_device() if available else 0)
