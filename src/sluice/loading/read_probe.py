"""How fast this machine does small parts of a load, measured: what ``sluice.plan(probe=True)`` estimates times from.

The part of sluice is a small load of its own: boxes of tensors from all over the checkpoint go through planner, engine
and targets, and are thrown away. What other ways to load do is measured piece by piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES
from sluice._geometry import contiguous_stride
from sluice._options import TransferOptions
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.targets import Targets
from sluice.entries.slicing import boxes, slice_entry
from sluice.planning.other_methods import Rates
from sluice.planning.reads import is_cached
from sluice.reading import transfer as _transfer
from sluice.records import LoadPlan, Read, Request

__all__ = ["probe_rates"]

#: Bytes of the pieces that torch's own work is measured with.
_PIECE_BYTES = 32 << 20


def probe_rates(
    checkpoint: OpenCheckpoint, requests: Sequence[Request], plan: LoadPlan, *, device: str, transfer: TransferOptions
) -> Rates:
    """Read a little and return how fast that was. Takes up to about 200 MiB of memory for a moment.

    Args:
        checkpoint: Where the bytes come from.
        requests: What the load would read.
        plan: How it would.
        device: Where most of it goes.
        transfer: How the bytes are moved.
    """
    serial, cached = _serial_rate(checkpoint, plan)  # first: what sluice reads through the cache would be cached
    sample = list(_sample(requests))
    prepared = _transfer.plan_transfer(checkpoint, sample, options=transfer)
    begin = time.perf_counter()
    _transfer.run(checkpoint, prepared, Targets(prepared.plan))
    seconds = time.perf_counter() - begin
    return Rates(
        sluice=max(1.0, prepared.plan.read_bytes / seconds),
        serial=serial,
        initialise=_rate(lambda: torch.empty(_PIECE_BYTES // 4, dtype=torch.float32).uniform_()),
        copy=_copy_rate("cpu"),
        bus=None if device == "cpu" else _copy_rate(device),
        cached=cached,
    )


def _sample(requests: Sequence[Request]) -> Iterator[Request]:
    """Yield boxes of the tensors, evenly from all of them, of about ``PROBE_READ_BYTES`` together."""
    total = sum(request.entry.nbytes for request in requests)
    step = max(1, -(-total // options.PROBE_READ_BYTES))
    number = 0
    for request in requests:
        if request.entry.numel == 0:
            continue
        for key in boxes(request.entry.shape, options.READ_BYTES // ITEM_BYTES[request.entry.dtype]):
            if number % step == 0:
                entry = slice_entry(request.entry, key) if key else request.entry
                yield Request(
                    name=request.name,
                    entry=entry,
                    dtype=request.dtype,
                    device=request.device,
                    stride=contiguous_stride(entry.shape),
                )
            number += 1


def _serial_rate(checkpoint: OpenCheckpoint, plan: LoadPlan) -> tuple[float, bool]:
    """Return the bytes a second of one thread through the page cache, and whether most of them lay in it already."""
    sources = checkpoint.sources
    nbytes = hits = 0
    seconds = 0.0
    for read in _spread(plan.reads):
        was_cached = is_cached(plan.facts.files[read.file], read.offset, read.nbytes)
        begin = time.perf_counter()
        sources[read.file].read_into(read.offset, memoryview(bytearray(read.nbytes)))
        seconds += time.perf_counter() - begin
        nbytes += read.nbytes
        hits += read.nbytes if was_cached else 0
        if not was_cached:
            sources[read.file].forget(read.offset, read.nbytes)
    return (nbytes / seconds if nbytes else _copy_rate("cpu")), 2 * hits > nbytes


def _spread(reads: Sequence[Read]) -> Iterator[Read]:
    """Yield reads from all over the plan, half of ``PROBE_READ_BYTES`` together."""
    total = sum(read.nbytes for read in reads)
    step = max(1, -(-2 * total // options.PROBE_READ_BYTES))
    yield from reads[step // 2 :: step]


def _copy_rate(device: str) -> float:
    source = torch.zeros(_PIECE_BYTES // 4, dtype=torch.float32)

    def copy() -> torch.Tensor:
        copied = torch.empty(source.shape, dtype=torch.float32, device=device).copy_(source)
        return copied if device == "cpu" else copied.sum().cpu()  # waits for the device

    return _rate(copy)


def _rate(work: Callable[[], torch.Tensor]) -> float:
    work()  # the first time pays for thread pools and kernels
    begin = time.perf_counter()
    work()
    return _PIECE_BYTES / (time.perf_counter() - begin)
