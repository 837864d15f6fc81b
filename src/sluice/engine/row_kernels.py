"""Computations on rows: what a copy computes between a staging buffer and its target.

A row function fills rows of a target from the same rows of a source. Its result for a row must not depend on which
other rows are computed with it, so that the engine may cut a tensor between any two rows. Copying, casting
and scaling compute each element by itself and may be cut anywhere.

Functions run in the engine's threads, without gradients, and must not keep their arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from sluice.records import Elements

__all__ = ["RowFunction", "cast", "row_function", "scaled"]


class RowFunction(Protocol):
    """Fills rows of a target."""

    def __call__(self, target: torch.Tensor, rows: torch.Tensor, first_row: int, /) -> None:
        """Compute ``target`` from ``rows``.

        Args:
            target: Memory of the finished rows: ``(rows, elements of a finished row)`` for a row kernel, the shape of
                ``rows`` otherwise.
            rows: The stored rows, in their own dtype.
            first_row: Position of the first of them in the whole tensor.
        """
        ...


def cast(target: torch.Tensor, rows: torch.Tensor, _first_row: int, /) -> None:
    """Copy elements, cast to the target's dtype if it differs."""
    target.copy_(rows)


def scaled(factors: Iterable[float], function: RowFunction = cast) -> RowFunction:
    """Return the function that multiplies by each factor in the dtype of the source, then calls ``function``."""

    def scale(target: torch.Tensor, rows: torch.Tensor, first_row: int, /) -> None:
        for factor in factors:
            rows = rows * factor
        function(target, rows, first_row)

    return scale


def row_function(elements: Elements, kernels: Mapping[str, RowFunction]) -> RowFunction:
    """Return what fills a target from stored elements.

    Args:
        elements: How they are stored and computed with; conjugates and negatives are views, made before.
        kernels: The functions that row kernels name.
    """
    kernel = kernels[elements.kernel.name] if elements.kernel is not None else cast
    return scaled(elements.factors, kernel) if elements.factors else kernel
