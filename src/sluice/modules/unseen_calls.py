"""Calls that torch does not show to function modes: compiled functions, and the entries of ``torch.func``.

Compiled functions (``torch.jit``) run in C++. They ask a tensor on meta for its device from there, so a tensor without
memory must not reach them. ``torch.func`` wraps its arguments; torch cannot give memory to what is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from sluice.modules.constructor_calls import ConstructorCalls
from sluice.modules.refusals import refusal

# torch's compiled functions have no public class.
# ruff: noqa: SLF001

__all__ = ["script_function", "script_method", "transform_entry"]

_Function = Callable[..., Any]
_Current = Callable[[], ConstructorCalls | None]


def script_function(original: _Function, current: _Current) -> _Function:
    """Return the ``__call__`` of compiled functions that gives arguments memory or values."""

    @wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        calls = current()
        if calls is None:
            return original(self, *args, **options)
        return calls.run_with_values(partial(original, self), args, options)

    return call


def script_method(original: _Function, current: _Current) -> _Function:
    """Return the ``__call__`` of methods of compiled modules; it refuses modules whose own tensors have no memory."""

    @wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        calls = current()
        if calls is None:
            return original(self, *args, **options)
        with torch._C.DisableTorchFunction():
            own = [calls.histories.of(tensor) for tensor in _tensors_of(self.owner)]
        for history in own:
            if history is not None:
                raise refusal(self, history, "a compiled module cannot compute them")
        return calls.run_with_values(partial(original, self), args, options)

    return call


def transform_entry(original: _Function, current: _Current) -> _Function:
    """Return an entry of ``torch.func`` that gives its tensor memory."""

    @wraps(original)
    def enter(*args: Any) -> Any:
        calls = current()
        if calls is not None:
            with temporarily_clear_interpreter_stack():  # what is computed here would be wrapped too
                history = calls.give_arguments_memory(args)
            if history is not None:
                raise refusal(original, history, "functions that torch.func transforms cannot be repeated")
        return original(*args)

    return enter


def _tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a compiled module and of those in it."""
    kinds: Any = torch._C
    for of_kind in (kinds.ParameterDict(module), kinds.BufferDict(module)):
        yield from (tensor for _, tensor in of_kind.items())
    for _, child in kinds.ModuleDict(module).items():  # noqa: PERF102  it has no values()
        yield from _tensors_of(child)
