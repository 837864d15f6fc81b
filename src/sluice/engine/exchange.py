"""Exchange the values of live tensors with new ones, so that the old values can be put back without other memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sluice.entries.slicing import boxes

__all__ = ["Exchange"]

#: Bytes that are exchanged at a time, and held once more in that time.
_PIECE_BYTES = 4 << 20


class Exchange:
    """A group of live tensors that change together, by their positions."""

    def __init__(self, positions: Sequence[int], scratch: dict[torch.device, torch.Tensor]) -> None:
        self.positions = positions
        #: Room for a piece on each device, shared by all groups: the heap would keep freed pieces between live objects.
        self._scratch = scratch
        #: Positions of the tensors that have begun to change, and of those that are complete.
        self.begun: set[int] = set()
        self.complete: set[int] = set()
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []

    def swap(self, position: int, live: torch.Tensor, new: torch.Tensor) -> None:
        """Exchange the values of two tensors of one shape and dtype."""
        self.begun.add(position)
        scratch = self._scratch.get(live.device)
        if scratch is None:
            scratch = self._scratch[live.device] = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=live.device)
        for box in boxes(tuple(live.shape), _PIECE_BYTES // live.itemsize):
            target, source = live[box], new[box]
            old = scratch[: target.numel() * live.itemsize].view(live.dtype).view(target.shape)
            old.copy_(target)
            self._pieces.append((target, old))  # until the memory of the new values has them
            target.copy_(source)
            source.copy_(old)
            self._pieces[-1] = (target, source)
        self.complete.add(position)

    def undo(self) -> None:
        """Put the old values back, those first that were exchanged last: tensors may overlap."""
        self.complete.clear()
        while self._pieces:
            target, old = self._pieces[-1]
            with torch.inference_mode(mode=target.is_inference()), torch.no_grad():
                target.copy_(old)
            self._pieces.pop()
        self.begun.clear()
