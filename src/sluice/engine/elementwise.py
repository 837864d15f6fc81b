"""The computation of elements between a staging buffer and their target: arithmetic with numbers, and casts.

Each element is computed by itself, so that a tensor may be cut anywhere. It runs in the engine's threads, without
gradients. Conjugates and negatives are views, and packs are decoded, before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TypeAlias

import torch

from sluice.records import Arithmetic

__all__ = ["Steps", "compute", "scratch"]

#: Operations with a number, one after the other.
Steps: TypeAlias = Iterable[tuple[Arithmetic, float]]


def compute(target: torch.Tensor, elements: torch.Tensor, steps: Steps = ()) -> None:
    """Compute each step in the dtype of the elements, and copy the result, cast to the target's dtype."""
    for operation, number in steps:
        elements = getattr(elements, operation)(number)
    target.copy_(elements)


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
