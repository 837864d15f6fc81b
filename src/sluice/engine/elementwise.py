"""Computations on elements between a staging buffer and their target: casts, and arithmetic with numbers.

Each element is computed by itself, so that a tensor may be cut anywhere. Functions run in the engine's threads, without
gradients, and must not keep their arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

import torch

from sluice.records import Arithmetic, Elements

__all__ = ["ElementFunction", "cast", "computed", "element_function", "scratch"]


class ElementFunction(Protocol):
    """Fills elements of a target."""

    def __call__(self, target: torch.Tensor, elements: torch.Tensor, /) -> None:
        """Compute ``target`` from ``elements``, which have its shape and their own dtype."""
        ...


def cast(target: torch.Tensor, elements: torch.Tensor, /) -> None:
    """Copy elements, cast to the target's dtype if it differs."""
    target.copy_(elements)


def computed(arithmetic: Iterable[tuple[Arithmetic, float]]) -> ElementFunction:
    """Return the function that computes each step in the dtype of the source, then casts."""

    def compute(target: torch.Tensor, elements: torch.Tensor, /) -> None:
        for operation, number in arithmetic:
            elements = getattr(elements, operation)(number)
        target.copy_(elements)

    return compute


def element_function(elements: Elements) -> ElementFunction:
    """Return what fills a target from elements; conjugates and negatives are views, and packs are decoded, before."""
    return computed(elements.arithmetic) if elements.arithmetic else cast


class _Scratch(threading.local):
    """Memory of a thread that is used again for every copy; what was written is gone after the next use.

    If each copy allocated its own, malloc kept 30 MiB of them in the arena of each thread.
    """

    bytes = torch.empty(0, dtype=torch.uint8)

    def of_at_least(self, nbytes: int) -> torch.Tensor:
        """Return at least ``nbytes`` bytes."""
        if self.bytes.numel() < nbytes:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8)
        return self.bytes


scratch = _Scratch()
