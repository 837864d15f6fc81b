"""``lazy_state_dict``: weights of any source for ``from_pretrained(None, config=, state_dict=)`` of transformers.

transformers takes a state dict whose values are read when they are needed. This one reads a ``.pth`` file, a URL, a
directory of ``torch.distributed.checkpoint`` or a GGUF file, and holds only tensors under way. The library converts,
ties, divides and quantizes as always. ``sluice.hf.from_pretrained`` reads faster; use this for what it refuses.
"""

from __future__ import annotations

from typing import Any

import torch

from sluice.api.checkpoint import Checkpoint, LazyTensor
from sluice.api.checkpoint import open as open_checkpoint
from sluice.checkpoint.open_checkpoint import CheckpointSource
from sluice.formats.safetensors.header import DTYPES
from sluice.matching.selection import only_state_dict

__all__ = ["lazy_state_dict"]


class LazyWeight:
    """A tensor that is read when it is indexed, with the methods that transformers calls before."""

    def __init__(self, lazy: LazyTensor) -> None:
        self._lazy = lazy
        self.dtype = lazy.dtype
        self.shape = torch.Size(lazy.shape)

    def __getitem__(self, key: Any) -> torch.Tensor:
        return (self._lazy if key is Ellipsis else self._lazy[key]).read()

    def get_shape(self) -> list[int]:
        """Return the size of each dimension."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors writes it: ``"F32"``, ``"BF16"``, ..."""
        return next((code for code, name in DTYPES.items() if name == self._lazy.entry.dtype), "")

    def is_floating_point(self) -> bool:
        """Return whether its elements are real floating-point numbers."""
        return self.dtype.is_floating_point


def lazy_state_dict(source: CheckpointSource, *, key: str | None = None) -> dict[str, Any]:
    """Return the state dict of a checkpoint with tensors that are read when they are indexed.

    Args:
        source: Any source of ``sluice.open``. It stays open until the last tensor is gone.
        key: Part of it; None takes the only state dict.

    Example:
        >>> state = lazy_state_dict("model.pth")
        >>> model = AutoModelForCausalLM.from_pretrained(None, config=config, state_dict=state)
    """
    checkpoint = open_checkpoint(source)
    found = only_state_dict(checkpoint.index.tree, checkpoint.path) if key is None else key
    part: Checkpoint = open_checkpoint(checkpoint, key=found) if found else checkpoint
    return {name: LazyWeight(lazy) for name, lazy in part.items()}
