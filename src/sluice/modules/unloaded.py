"""Modules whose weights are not there refuse calls, until they are loaded or streamed again.

torch does not: a linear layer or a convolution with weights on meta, called with input on the CPU, returns numbers, and
so does a module that a failed load has filled in part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from sluice._errors import PartialLoadError, StreamError

__all__ = ["is_partly_loaded", "refuse_calls", "refusing"]

#: Attribute of tensors that a failed load may have changed: their version then. Not a table with weak references, with
#: which torch does not swap tensors.
_MARK = "_sluice_changed_at"


def refuse_calls(module: nn.Module) -> None:
    """Make every part of a module that has weights on meta, or changed by a failed load, raise when it is called.

    Calls while all of them are in memory succeed, and so do those with other weights, such as restored ones. A load or
    a stream of the module ends this.
    """
    for part in module.modules():
        if next(_missing(part), None) is not None and _refuse not in part._forward_pre_hooks.values():  # noqa: SLF001
            part.register_forward_pre_hook(_refuse, prepend=True)


def is_partly_loaded(module: nn.Module) -> bool:
    """Return whether a failed load has changed some of the weights, and none has succeeded since."""
    return any(_MARK in vars(tensor) for tensor in _tensors(module).values())


@contextmanager
def refusing(module: nn.Module) -> Iterator[None]:
    """Refuse calls of the module after a failure of the block, which loads or streams it, and accept them otherwise."""
    try:
        yield
    except BaseException as error:
        if _is_partial(error):
            for tensor in _tensors(module).values():
                vars(tensor)[_MARK] = _version(tensor)
        refuse_calls(module)
        raise
    # Not in the hook: torch.func.functional_call gives a module other weights for one call.
    if _refuse in module._forward_pre_hooks.values():  # noqa: SLF001  so that the hook can be pickled with the module
        for part in module.modules():
            hooks = part._forward_pre_hooks  # noqa: SLF001
            for number in [number for number, hook in hooks.items() if hook is _refuse]:
                del hooks[number]
        for tensor in _tensors(module).values():
            vars(tensor).pop(_MARK, None)


def _is_partial(error: BaseException) -> bool:
    """Return whether a load failed after live tensors began to change; an interrupt has the text of that as a note."""
    if not isinstance(error, Exception):
        return bool(getattr(error, "__notes__", None))
    return isinstance(error, PartialLoadError) or isinstance(error.__cause__, PartialLoadError)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(module.named_parameters(), module.named_buffers()))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001  it has no public name


def _missing(module: nn.Module) -> Iterator[str]:
    """Yield the names of the tensors whose values are not there."""
    for name, tensor in _tensors(module).items():
        if tensor.is_meta or ((mark := vars(tensor).get(_MARK)) is not None and mark == _version(tensor)):
            yield name


def _refuse(module: nn.Module, args: Any) -> None:  # noqa: ARG001  a hook of torch
    name = next(_missing(module), None)
    if name is not None:
        raise StreamError(
            "the weights are not in memory: the load failed, or the stream has ended",
            tensor=name,
            advice="Load them with sluice.load_into, or run the model inside of sluice.stream.",
        )
