"""Measure the speed of a small load of the same files; ``sluice.plan(probe=True)`` estimates the time of the whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from sluice._defaults import PROBE_READ_BYTES, READ_BYTES
from sluice._dtypes import ITEM_BYTES
from sluice._options import TransferOptions
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.targets import Targets
from sluice.entries.slicing import boxes, slice_entry
from sluice.reading.transfer import plan_transfer, run
from sluice.records import Request
from sluice.records.geometry import contiguous_stride

__all__ = ["probed_bytes_per_second"]


def probed_bytes_per_second(
    checkpoint: OpenCheckpoint, requests: Sequence[Request], *, options: TransferOptions
) -> float:
    """Load boxes of tensors from the whole checkpoint, discard them, and return the speed."""
    prepared = plan_transfer(checkpoint, list(_sample(requests)), options=options)
    begin = time.perf_counter()
    run(checkpoint, prepared, Targets(prepared.plan))
    return max(1.0, prepared.plan.read_bytes / (time.perf_counter() - begin))


def _sample(requests: Sequence[Request]) -> Iterator[Request]:
    """Yield boxes spread evenly over the tensors, about ``PROBE_READ_BYTES`` in total."""
    step = max(1, -(-sum(request.entry.nbytes for request in requests) // PROBE_READ_BYTES))
    position = 0
    for request in requests:
        if request.entry.numel == 0:
            continue
        for key in boxes(request.entry.shape, READ_BYTES // ITEM_BYTES[request.entry.dtype]):
            if position % step == 0:
                entry = slice_entry(request.entry, key) if key else request.entry
                yield Request(
                    name=request.name,
                    entry=entry,
                    dtype=request.dtype,
                    device=request.device,
                    stride=contiguous_stride(entry.shape),
                )
            position += 1
