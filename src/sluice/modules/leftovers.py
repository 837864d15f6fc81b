"""Tensors in modules: which are torch's own memory, which are nested in attributes, and which no load could fill.

Leftovers are the tensors that no state dict holds: attributes and non-persistent buffers. They must be real, and not
share the memory of a parameter that ``empty_init`` dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from sluice.modules.emptied import EMPTIED

# No public view of a module tells its registered tensors from its attributes.
# ruff: noqa: SLF001

__all__ = ["NESTING", "find_leftovers", "is_plain", "map_tensors", "tensors_in"]

#: Attributes in which a module keeps registered tensors and modules.
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})

#: Types of most other attributes, which hold no tensor.
_PLAIN = frozenset({bool, int, float, str, type(None)})

#: Levels of lists and dicts in attributes that are searched for tensors.
NESTING = 3


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is strided memory of torch's own.

    False for fake and functional tensors, lazy parameters, sparse and quantized tensors, and subclasses with their own
    memory or operators, such as DTensor. Other subclasses of ``nn.Parameter`` are plain.
    """
    if not _is_plain_kind(type(tensor)):
        return False
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


@lru_cache(maxsize=64)
def _is_plain_kind(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of a class can be strided memory of torch's own."""
    known = kind is torch.Tensor or torch.nn.Parameter in kind.__mro__
    lazy = issubclass(kind, (UninitializedParameter, UninitializedBuffer))
    return known and not lazy and kind.__torch_dispatch__ == torch.Tensor.__torch_dispatch__


def find_leftovers(
    module: nn.Module, buffers: Iterable[tuple[str, torch.Tensor]], registered: Container[int]
) -> Iterator[str]:
    """Yield a sentence for each tensor that a load could not fill.

    Args:
        module: The module.
        buffers: Name and tensor of each non-persistent buffer.
        registered: Ids of all registered tensors.
    """
    for name, tensor in buffers:
        if tensor.is_meta:
            yield (
                f"non-persistent buffer {name!r} is on the meta device and not in state dicts: build the model "
                "under sluice.empty_init(), or, if it is computed from parameters, compute it after loading"
            )
        elif _was_emptied(tensor):
            yield _shares(f"non-persistent buffer {name!r}")
    seen: set[int] = set()
    for path, part in module.named_modules():
        for name, value in _attributes(part):
            label = f"attribute {(f'{path}.{name}' if path else name)!r}"
            tensors = [tensor for tensor in tensors_in(value) if not (id(tensor) in registered or id(tensor) in seen)]
            seen.update(map(id, tensors))
            if any(tensor.is_meta for tensor in tensors):
                yield (
                    f"{label} holds a tensor on the meta device that is neither a parameter nor a buffer: compute it "
                    "after loading, or from real tensors under sluice.empty_init()"
                )
            elif any(map(_was_emptied, tensors)):
                yield _shares(label)


def _was_emptied(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the memory with which a parameter was made before ``empty_init`` emptied it."""
    return is_plain(tensor) and EMPTIED.get(tensor) is not None


def _shares(label: str) -> str:
    return (
        f"{label} shares the memory of a parameter or buffer, which has new memory after sluice.empty_init(): compute "
        "it after loading, or make it a property"
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a module that may hold tensors, but for those that are computed in each forward."""
    recomputed: set[object] = set()
    for hook in module._forward_pre_hooks.values():  # of weight_norm, spectral_norm and pruning
        recomputed.add(getattr(hook, "name", None) or getattr(hook, "_tensor_name", None))
    if isinstance(module, nn.RNNBase):
        recomputed.add("_flat_weights")  # if parametrizations replace its weights
    for name, value in vars(module).items():
        if type(value) in _PLAIN or (type(value) in {dict, OrderedDict, list, tuple, set} and not value):
            continue  # a fast path for nearly all attributes
        if name not in _REGISTERED and name not in recomputed:
            yield name, value


def tensors_in(value: object, depth: int = NESTING) -> Iterator[torch.Tensor]:
    """Yield the tensor, or the tensors in a list, tuple or dict, nested up to ``depth`` levels."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth:
        for member in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(member, depth - 1)


def map_tensors(value: Any, change: Callable[[torch.Tensor], object]) -> Any:
    """Return a value with other tensors: in lists, tuples and dicts, which are copied; others are the same."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in {tuple, list}:
        return type(value)(map_tensors(member, change) for member in value)
    if type(value) is dict:
        return {name: map_tensors(member, change) for name, member in value.items()}
    return value
