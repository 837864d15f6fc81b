"""Calls of ``torch.empty``, ``zeros``, ``ones`` and ``full``, whose results get memory later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device

from sluice.modules.function_kinds import NOT_DEFERRED, NUMBERS

__all__ = ["can_defer", "uninitialised"]

_Function = Callable[..., Any]
_META, _CPU = torch.device("meta"), torch.device("cpu")


def can_defer(func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether a call of a factory makes an ordinary tensor on the CPU."""
    device = options.get("device") or _device.CURRENT_DEVICE
    if (device is not None and device not in {"cpu", _CPU}) or not NOT_DEFERRED.isdisjoint(options):
        return False
    return func != torch.full or {type(value) for value in (*args[1:], options.get("fill_value", 0))} <= NUMBERS


def uninitialised(func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """Return a tensor on meta as a factory makes it. All but ``torch.empty`` import torch's compiler there."""
    options = {**options, "device": _META}
    if func != torch.full:
        return torch.empty(*args, **options)
    size = args[0] if args else options.pop("size")
    value = args[1] if len(args) > 1 else options.pop("fill_value")
    if options.get("dtype") is None:
        dtypes = {bool: torch.bool, int: torch.int64}
        options["dtype"] = dtypes.get(type(value)) or torch.result_type(torch.empty(0, device=_META), value)
    return torch.empty(size, **options)
