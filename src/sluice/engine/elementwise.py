"""Computations on elements between a staging buffer and their target: casts and factors.

Each element is computed by itself, so that a tensor may be cut anywhere. Functions run in the engine's threads, without
gradients, and must not keep their arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from sluice.records import Elements

__all__ = ["ElementFunction", "cast", "element_function", "scaled"]


class ElementFunction(Protocol):
    """Fills elements of a target."""

    def __call__(self, target: torch.Tensor, elements: torch.Tensor, /) -> None:
        """Compute ``target`` from ``elements``, which have its shape and their own dtype."""
        ...


def cast(target: torch.Tensor, elements: torch.Tensor, /) -> None:
    """Copy elements, cast to the target's dtype if it differs."""
    target.copy_(elements)


def scaled(factors: Iterable[float]) -> ElementFunction:
    """Return the function that multiplies by each factor in the dtype of the source, then casts."""

    def scale(target: torch.Tensor, elements: torch.Tensor, /) -> None:
        for factor in factors:
            elements = elements * factor
        target.copy_(elements)

    return scale


def element_function(elements: Elements) -> ElementFunction:
    """Return what fills a target from elements; conjugates and negatives are views, and packs are decoded, before."""
    return scaled(elements.factors) if elements.factors else cast
