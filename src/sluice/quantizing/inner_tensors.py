"""The plain tensors that a tensor subclass consists of, by torch's protocol ``__tensor_flatten__``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["assemble", "inner_bytes", "inner_tensors", "is_assembled"]


def is_assembled(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of others."""
    return hasattr(tensor, "__tensor_flatten__")


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of which a tensor consists, in the order of the protocol; a plain tensor itself."""
    if not is_assembled(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from inner_tensors(getattr(tensor, name))


def inner_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the plain tensors of which a tensor consists."""
    return sum(inner.nbytes for inner in inner_tensors(tensor))


def assemble(template: torch.Tensor, inner: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a tensor like ``template``, which may be on the meta device, that consists of other plain tensors."""
    return _assemble(template, iter(inner))


def _assemble(template: Any, inner: Iterator[torch.Tensor]) -> torch.Tensor:
    if not is_assembled(template):
        return next(inner)
    names, context = template.__tensor_flatten__()
    parts = {name: _assemble(getattr(template, name), inner) for name in names}
    made: torch.Tensor = type(template).__tensor_unflatten__(parts, context, template.shape, template.stride())
    return made
