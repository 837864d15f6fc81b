"""Optimizer state that stays on another device until the first step.

``Optimizer.load_state_dict`` moves state to its parameters: tensors of a subclass refuse that move, and a pre-hook of
``step`` does it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["keep_device", "move_at_first_step"]


def keep_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that ``Optimizer.load_state_dict`` does not move; it takes the original."""
    fixed = tensor.as_subclass(_Fixed)
    fixed.kept = tensor
    return fixed


class _Fixed(torch.Tensor):
    """A tensor whose ``.to`` returns it unchanged: ``load_state_dict`` would move it to its parameter."""

    kept: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.to and isinstance(args[0], cls):
            return args[0].kept
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  the public class
            return func(*args, **(kwargs or {}))


def move_at_first_step(optimizer: Optimizer) -> None:
    """Move the state of an optimizer to the devices of its parameters when ``step`` is next called.

    Tensors move one at a time: the memory of each is freed as soon as it is copied.
    """
    moved = False

    def move(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        nonlocal moved
        for group in () if moved else optimizer.param_groups:
            steps_too = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                _move(optimizer.state.get(parameter), parameter.device, steps_too=steps_too)
        moved = True

    # It stays: torch is iterating over the hooks while it runs, and fails if one of them is removed.
    optimizer.register_step_pre_hook(move)


def _move(value: Any, device: torch.device, *, steps_too: bool) -> Any:
    """Return a value with its tensors on the device; dicts and lists are changed in place."""
    if isinstance(value, torch.Tensor):
        return value.to(device=device)
    if isinstance(value, dict):
        for name, child in value.items():
            if name != "step" or steps_too or not isinstance(child, torch.Tensor):
                value[name] = _move(child, device, steps_too=steps_too)
    elif isinstance(value, list):
        value[:] = [_move(child, device, steps_too=steps_too) for child in value]
    elif isinstance(value, tuple):
        return tuple(_move(child, device, steps_too=steps_too) for child in value)
    return value
