"""Calls of a constructor with a rule of their own: moves, devices, addresses, copies, and ``tensor.data = other``.

Each function takes the context, the function of torch and its arguments. See ``constructor_calls``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sluice.modules import function_kinds as kinds
from sluice.modules.destinations import destination
from sluice.modules.histories import empty_on_meta
from sluice.modules.meta_initialisers import SET_DATA
from sluice.modules.swap import swap_data

if TYPE_CHECKING:
    from sluice.modules.constructor_calls import ConstructorCalls

# Storages have no public identity, and torch passes private functions to modes.
# ruff: noqa: SLF001

__all__ = ["SPECIAL_CALLS"]

_Function = Callable[..., Any]
_T: Any = torch.Tensor
_META, _CPU = torch.device("meta"), torch.device("cpu")


def _move(calls: ConstructorCalls, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    tensor = args[0]
    device, dtype, layout = destination(calls.histories, func, args[1:], options)
    history = calls.histories.of(tensor)
    if history is None:
        other = args[1] if len(args) > 1 else None
        if isinstance(other, torch.Tensor) and calls.histories.of(other) is not None:
            return tensor.to(device, other.dtype, **options)
        return func(*args, **options)
    if not history.empty:
        if device in {None, _CPU} and layout is None and not options.get("copy"):
            return tensor if dtype in {None, tensor.dtype} else calls.run(_T.to, (tensor, dtype), {})
        calls.give_memory(history)
        return func(*args, **options)
    device, dtype = device or history.device, dtype or tensor.dtype
    if (device, dtype) == (history.device, tensor.dtype) and layout is None and not options.get("copy"):
        return tensor
    call = calls.histories.freeze_call(_T.to, (tensor,), {"dtype": dtype})
    moved = torch.empty_like(tensor, dtype=dtype, memory_format=layout) if layout else empty_on_meta(tensor, dtype)
    if device != _META:
        calls.histories.derive(moved, call, device, empty=True).owner = history.owner
    return moved


def _parse_to(calls: ConstructorCalls, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Answer ``Module.to``, which may name a tensor whose device and dtype are meant."""
    device, *others = func(*args, **options)
    history = calls.histories.of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
    return (device if history is None else history.device, *others)


def _set_data(calls: ConstructorCalls, func: _Function, args: tuple[Any, ...], _options: dict[str, Any]) -> Any:
    tensor, value = args
    history, values = calls.histories.of(tensor), calls.histories.of(value)
    if values is None and not value.is_meta:
        if history is not None and not history.empty:
            calls.give_memory(history)
        elif tensor.is_meta:
            value = calls.emptied.stand_in(value)
            new = calls.histories.of(value)
            if history is not None and new is not None:
                new.owner = new.owner or history.owner
        return func(tensor, value)
    if values is not None and not values.empty:
        if history is None or not history.empty:
            calls.give_memory(values)
            if history is not None:
                calls.give_memory(history)
            return func(tensor, value)
        values.empty, values.owner, values.held = True, history.owner, []
    if history is not None and not history.empty:
        history.release(tensor)  # it has the other memory from now on
    if values is not None and not tensor.is_meta and swap_data(tensor, value.detach()):
        return None
    return func(tensor, value)


def _like(calls: ConstructorCalls, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    tensor = args[0] if args else options.get("input")
    history = calls.histories.of(tensor) if isinstance(tensor, torch.Tensor) else None
    if history is None or tensor is None:
        return calls.run(func, args, options)
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=history.device)
    return func(like, *args[1:], **{name: value for name, value in options.items() if name != "input"})


def _describe(calls: ConstructorCalls, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    history = calls.histories.of(args[0])
    if history is None or (history.empty and func == _IS_META):
        return func(*args, **options)
    return _DESCRIPTIONS[func](history.device)


def _data_ptr(calls: ConstructorCalls, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    history = calls.histories.of(args[0])
    if history is None or not history.empty:
        return calls.run(func, args, options)
    # Constructors compare addresses to find ties; all are 0 on meta.
    return history.storage._cdata + args[0].storage_offset() * args[0].itemsize


def _deepcopy(calls: ConstructorCalls, func: _Function, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    tensor = args[0]
    history = calls.histories.of(tensor)
    if history is None or not history.empty:
        return calls.run(func, args, options)
    call = calls.histories.freeze_call(torch.clone, (tensor,), {})
    memo = args[1] if len(args) > 1 else options.get("memo", {})
    if id(tensor) in memo:
        return memo[id(tensor)]
    if type(tensor) is _T and not tensor.requires_grad and not vars(tensor):
        copied = memo[id(tensor)] = empty_on_meta(tensor)  # torch would import its compiler
    else:
        copied = func(*args, **options)
    if calls.histories.of(copied) is None:
        calls.histories.derive(copied, call, history.device, empty=True).owner = history.owner
    return copied


_IS_META = _T.is_meta.__get__
_DESCRIPTIONS: dict[Any, Callable[[torch.device], Any]] = {
    _T.device.__get__: lambda device: device,
    _T.is_cuda.__get__: lambda device: device.type == "cuda",
    _T.is_cpu.__get__: lambda device: device.type == "cpu",
    _IS_META: lambda _: False,
    _T.get_device: lambda device: -1 if device.index is None else device.index,
}

SPECIAL_CALLS: dict[Any, _Function] = {
    **dict.fromkeys(kinds.LIKE, _like),
    **dict.fromkeys(_DESCRIPTIONS, _describe),
    **dict.fromkeys((_T.to, _T.cuda, _T.cpu, _T.xpu), _move),
    SET_DATA: _set_data,
    torch._C._nn._parse_to: _parse_to,
    _T.data_ptr: _data_ptr,
    _T.__deepcopy__: _deepcopy,
}
