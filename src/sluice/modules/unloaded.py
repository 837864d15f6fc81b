"""Modules without weights in memory refuse calls, until they are loaded or streamed again.

torch does not: a linear layer or a convolution with weights on meta, called with input on the CPU, returns numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from sluice._errors import StreamError

__all__ = ["refuse_calls", "refusing"]


def refuse_calls(module: nn.Module) -> None:
    """Make every part of a module that has weights on meta raise a ``StreamError`` when it is called.

    Calls while all of them are in memory succeed. A load or a stream of the module ends this.
    """
    for part in module.modules():
        if next(_missing(part), None) is not None and _refuse not in part._forward_pre_hooks.values():  # noqa: SLF001
            part.register_forward_pre_hook(_refuse, prepend=True)


@contextmanager
def refusing(module: nn.Module) -> Iterator[None]:
    """Refuse calls of the module after a failure of the block, which loads or streams it, and accept them otherwise."""
    try:
        yield
    except BaseException:
        refuse_calls(module)
        raise
    # Not in the hook: torch.func.functional_call gives a module other weights for one call.
    if _refuse in module._forward_pre_hooks.values():  # noqa: SLF001  so that the hook can be pickled with the module
        for part in module.modules():
            hooks = part._forward_pre_hooks  # noqa: SLF001
            for number in [number for number, hook in hooks.items() if hook is _refuse]:
                del hooks[number]


def _missing(module: nn.Module) -> Iterator[str]:
    """Yield the names of the tensors on meta."""
    named: Iterator[tuple[str, torch.Tensor]] = chain(module.named_parameters(), module.named_buffers())
    return (name for name, tensor in named if tensor.is_meta)


def _refuse(module: nn.Module, args: Any) -> None:  # noqa: ARG001  a hook of torch
    name = next(_missing(module), None)
    if name is not None:
        raise StreamError(
            "the weights are not in memory: the load failed, or the stream has ended",
            tensor=name,
            advice="Load them with sluice.load_into, or run the model inside of sluice.stream.",
        )
