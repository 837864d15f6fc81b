"""Embeddings of a streamed model: only the rows that are looked up are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice._options import TransferOptions
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.targets import Targets
from sluice.entries.slicing import slice_entry
from sluice.reading.reader import CheckpointReader
from sluice.reading.transfer import plan_transfer
from sluice.records import Request
from sluice.records.geometry import contiguous_stride
from sluice.streaming.window import Window

__all__ = ["Lookup", "looks_up_rows"]


def looks_up_rows(module: nn.Module) -> bool:
    """Return whether a module only looks up rows of its weight, and does not change them."""
    # Quantized and parametrized weights are computed from other parameters.
    forward, has_weight = getattr(module.forward, "__func__", None), "weight" in module._parameters  # noqa: SLF001
    return forward is nn.Embedding.forward and has_weight and module.max_norm is None


class Lookup(Struct, frozen=True, kw_only=True, eq=False):
    """An embedding whose weight is not in memory."""

    #: Position of its block.
    block: int
    #: Position of the unit of its weight, which other blocks may use in whole.
    unit: int
    #: The whole weight.
    request: Request
    #: Checkpoint that it is in.
    checkpoint: OpenCheckpoint
    #: How bytes are moved.
    transfer: TransferOptions

    def __call__(self, ids: torch.Tensor, reader: CheckpointReader, window: Window) -> torch.Tensor:
        """Return the rows at ``ids``, as ``nn.Embedding`` does.

        Args:
            ids: Positions of rows, of any shape.
            reader: Reads the rows.
            window: Counts the bytes that are read.

        Raises:
            IndexError: The weight has no such row.
        """
        if not isinstance(ids, torch.Tensor) or ids.dtype not in {torch.int32, torch.int64}:
            nn.functional.embedding(ids, torch.empty(1, 1, device="cpu"))  # raises as it does for a loaded model
        count, width = self.request.entry.shape
        flat = ids.reshape(-1)
        found = torch.empty((len(flat), width), dtype=torch_dtype(self.request.dtype), device=ids.device)
        most = max(1, defaults.LOOKUP_BYTES // max(1, width * ITEM_BYTES[self.request.dtype]))
        for first in range(0, len(flat), most):
            piece = flat[first : first + most]
            wanted, places = torch.unique(piece, return_inverse=True)
            if wanted[0] < 0 or wanted[-1] >= count:
                raise IndexError("index out of range in self")  # as torch says
            rows = self._rows(wanted.tolist(), reader, window)
            found[first : first + len(piece)] = rows[places]
        return found.view(*ids.shape, width)

    def _rows(self, wanted: list[int], reader: CheckpointReader, window: Window) -> torch.Tensor:
        requests = [
            replace(self.request, entry=entry, stride=contiguous_stride(entry.shape))
            for entry in (slice_entry(self.request.entry, (slice(*run),)) for run in _runs(wanted))
        ]
        prepared = plan_transfer(self.checkpoint, requests, options=self.transfer)
        targets = Targets(prepared.plan)
        window.read_bytes += prepared.plan.read_bytes
        try:
            reader.begin(prepared.plan, targets).wait()
        except BaseException:
            targets.discard()
            raise
        return torch.cat(targets.take(prepared.views))


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the end of each run of consecutive numbers."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run_numbers = [number for _, number in run]
        yield run_numbers[0], run_numbers[-1] + 1
