"""Measure the speed of small parts of a load; ``sluice.plan(probe=True)`` estimates times from it.

The speed of sluice is measured by a small load: boxes of tensors from the whole checkpoint pass planner, engine and
targets, and are discarded. The steps of other ways to load are measured one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from sluice._defaults import PROBE_READ_BYTES, READ_BYTES
from sluice._dtypes import ITEM_BYTES
from sluice._geometry import contiguous_stride
from sluice._options import TransferOptions
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.targets import Targets
from sluice.entries.slicing import boxes, slice_entry
from sluice.planning.other_methods import Rates
from sluice.planning.reads import is_cached
from sluice.reading.transfer import plan_transfer, run
from sluice.records import LoadPlan, Read, Request

__all__ = ["probe_rates"]

#: Bytes of the tensors on which torch's own steps are measured.
_PIECE_BYTES = 32 << 20


def probe_rates(
    checkpoint: OpenCheckpoint, requests: Sequence[Request], plan: LoadPlan, *, device: str, options: TransferOptions
) -> Rates:
    """Read a sample and return the measured rates. Takes up to about 200 MiB of memory for a moment.

    Args:
        checkpoint: The checkpoint to read.
        requests: Requests of the load.
        plan: Plan of the load.
        device: Device of most of its bytes.
        options: How the bytes are moved.
    """
    serial, cached = _serial_rate(checkpoint, plan)  # first, because sluice may leave its reads in the cache
    sample = list(_sample(requests))
    prepared = plan_transfer(checkpoint, sample, options=options)
    begin = time.perf_counter()
    run(checkpoint, prepared, Targets(prepared.plan))
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
    """Yield boxes spread evenly over the tensors, about ``PROBE_READ_BYTES`` in total."""
    total = sum(request.entry.nbytes for request in requests)
    step = max(1, -(-total // PROBE_READ_BYTES))
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


def _serial_rate(checkpoint: OpenCheckpoint, plan: LoadPlan) -> tuple[float, bool]:
    """Return bytes per second of one thread through the page cache, and whether most of them were cached before."""
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
    """Yield reads spread evenly over the plan, half of ``PROBE_READ_BYTES`` in total."""
    total = sum(read.nbytes for read in reads)
    step = max(1, -(-2 * total // PROBE_READ_BYTES))
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
