"""Units in use without a call of their block: by backward passes, and by what they compute again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sluice.streaming.calls import Calls
from sluice.streaming.saved import SavedWeight
from sluice.streaming.units import Unit
from sluice.streaming.window import Window

__all__ = ["Backward"]


class Backward:
    """The block that was reached, whose units stay in memory until a different one is. The next ones are read ahead.

    Memory that autograd still views is not used again.
    """

    def __init__(self, units: Sequence[Unit], window: Window, calls: Calls, *, reads_ahead: bool) -> None:
        self._units, self._window, self._calls, self._reads_ahead = units, window, calls, reads_ahead
        self._block: int | None = None
        self._held = set[int]()

    def lend(self, saved: SavedWeight) -> torch.Tensor:
        """Return a weight that autograd saved."""
        self.reach(saved.unit)
        with self._window.holding(saved.unit), torch.inference_mode(mode=False), torch.no_grad():
            return saved.view_in(self._units[saved.unit])

    def reach(self, unit: int) -> None:
        """Hold a unit, unless a block is running, whose memory it might take."""
        block = self._calls.blocks.get(unit)
        if block is None or unit in self._held or self._window.used.keys() - self._held:
            return
        if block != self._block:
            self.end()
            self._block = block
            self._calls.note_part(block)
        self._window.acquire(unit, install=False)
        self._held.add(unit)
        if self._reads_ahead:
            self._window.read_ahead(self._calls.upcoming())

    def end(self) -> None:
        """Let the units go: a block is called, or the stream ends."""
        while self._held:
            self._window.release(self._held.pop(), installed=False)
        self._block = None
