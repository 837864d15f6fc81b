"""The plain tensors that a quantized weight consists of.

A tensor subclass names them by torch's protocol ``__tensor_flatten__``. Other parameters keep them in attributes,
in addition to their own data, as those of bitsandbytes do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from sluice._private_torch import make_subclass, storage_address

__all__ = ["assemble", "inner_tensors", "is_assembled"]

#: Objects and containers within each other in which tensors are looked for.
_NESTING = 8


def is_assembled(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a subclass that consists of others."""
    return hasattr(tensor, "__tensor_flatten__")


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of which a tensor consists, each once; a plain tensor itself.

    Those of a subclass are in the order of the protocol; otherwise its own data is the first.
    """
    if not is_assembled(tensor):
        known: set[object] = set()
        for kept in _kept(tensor):
            if (place := _place(kept)) not in known:
                known.add(place)
                yield kept
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from inner_tensors(getattr(tensor, name))


def assemble(template: Any, inner: Iterable[torch.Tensor], instead: Mapping[int, object] | None = None) -> torch.Tensor:
    """Return a tensor like ``template``, which may be on the meta device, that consists of other plain tensors.

    Args:
        template: The tensor.
        inner: The plain tensors, in the order of ``inner_tensors``.
        instead: Replaces objects in attributes, by their identity.
    """
    inner = iter(inner)  # parts of a part take theirs from the same iterator
    if is_assembled(template):
        names, context = template.__tensor_flatten__()
        parts = {name: assemble(getattr(template, name), inner, instead) for name in names}
        made: torch.Tensor = type(template).__tensor_unflatten__(parts, context, template.shape, template.stride())
        return made
    own = next(inner)
    if len(_kept(template)) == 1:
        return own
    places = list(map(_place, inner_tensors(template)))
    others = dict(zip(places, [own, *islice(inner, len(places) - 1)], strict=True))
    kept = {id(tensor): others[_place(tensor)] for tensor in _tensors_in(vars(template))}
    made = make_subclass(type(template), own, False)
    made.__dict__.update(copy.deepcopy(vars(template), {**(instead or {}), **kept}))
    return made


def _kept(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the data of a tensor without that protocol, and the tensors in its attributes."""
    own = make_subclass(torch.Tensor, tensor, False) if isinstance(tensor, nn.Parameter) else tensor
    return [own, *_tensors_in(vars(tensor))]


def _tensors_in(value: object, depth: int = _NESTING) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers and objects, without those of modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif not depth or isinstance(value, (nn.Module, type)):
        return
    elif isinstance(value, (dict, list, tuple)):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(member, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from _tensors_in(vars(value), depth - 1)


def _place(tensor: torch.Tensor) -> object:
    """Return what tells whether two plain tensors, which may be on the meta device, are the same memory."""
    return storage_address(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
