"""Checkpoints read batch by batch for hashing, counting and comparing.

While one batch is worked on, the engine reads the next. The work on a batch is divided over the processors. Two batches
and the staging buffers are all the memory that this takes, for tensors of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from msgspec import Struct

from sluice import _defaults as defaults
from sluice._errors import LimitError
from sluice._threads import Workers
from sluice.records import Entry
from sluice.records.geometry import contiguous_stride, round_down

if TYPE_CHECKING:
    from sluice.checkpoint.open_checkpoint import OpenCheckpoint

__all__ = [
    "Batch",
    "ScanItem",
    "check_repeats",
    "identity",
    "in_batches",
    "pipeline",
    "row_major",
    "windows",
    "work_through",
]

_Item = TypeVar("_Item")
_Read = TypeVar("_Read")


class ScanItem(Struct, Generic[_Item], frozen=True):
    """An entry to read, with data of the caller."""

    #: A tensor, or a part of one, that fits into a batch.
    entry: Entry
    #: Data of the caller, for use with the tensor.
    payload: _Item


Batch = list[ScanItem[_Item]]


def row_major(entry: Entry) -> bool:
    """Return whether the bytes of an entry in the file are those of a contiguous tensor, or of its packs in order."""
    computed = entry.elements.math_bits or entry.elements.arithmetic
    if entry.parts or entry.composite is not None or computed or entry.constant is not None:
        return False
    steps = zip(entry.shape, entry.stride, contiguous_stride(entry.shape), strict=True)
    return 0 in entry.shape or all(size == 1 or step == dense for size, step, dense in steps)


def identity(entry: Entry) -> object:
    """Return a key that is equal for entries with the same elements, so that tied tensors are read once."""
    if entry.parts or entry.composite is not None:
        return id(entry)
    return entry.storage, entry.storage_offset, entry.elements, entry.shape, entry.stride


def check_repeats(checkpoint: OpenCheckpoint, name: str, entry: Entry) -> None:
    """Refuse a tensor whose strides of 0 make it far larger than its stored bytes.

    Raises:
        LimitError: Its elements repeat more than ``SCAN_REPEATS`` times.
    """
    stored = sum(checkpoint.index.storages[number].nbytes for number in entry.storages)
    if entry.nbytes > defaults.SCAN_REPEATS * max(1 << 20, stored):
        problem = "the tensor repeats its stored elements too often to be read element by element"
        expected, found = f"at most {defaults.SCAN_REPEATS} times", f"{entry.nbytes} bytes of {stored}"
        advice = "Choose a part without it with key= (--key)."
        raise LimitError(problem, file=checkpoint.path, tensor=name, expected=expected, found=found, advice=advice)


def windows(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges ``(first, end)`` in which a file is read; inner boundaries lie on a grid."""
    while first < end:
        last = min(end, round_down(first, defaults.SCAN_WINDOW_BYTES) + defaults.SCAN_WINDOW_BYTES)
        yield first, last
        first = last


def in_batches(pieces: Iterable[ScanItem[_Item]], batch_bytes: int) -> Iterator[Batch[_Item]]:
    """Yield the items in batches of at most ``batch_bytes``, at least one item each."""
    batch: Batch[_Item] = []
    nbytes = 0
    for piece in pieces:
        more = piece.entry.nbytes
        if batch and (nbytes + more > batch_bytes or len(batch) == defaults.SCAN_BATCH_PIECES):
            yield batch
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += more
    if batch:
        yield batch


def pipeline(
    batches: Iterable[Batch[_Item]],
    start: Callable[[Batch[_Item]], Callable[[], _Read]],
    use: Callable[[Batch[_Item], _Read], None],
) -> None:
    """Read every batch and use it, in order; while one is used, the next is read.

    Args:
        batches: What to read.
        start: Begins to read a batch and returns the function that waits for the result.
        use: Called with a batch and its result.
    """
    waiting: tuple[Batch[_Item], Callable[[], _Read]] | None = None
    for batch in batches:
        following = batch, start(batch)
        if waiting is not None:
            use(waiting[0], waiting[1]())
        waiting = following
    if waiting is not None:
        use(waiting[0], waiting[1]())


def work_through(workers: Workers, tasks: Iterable[tuple[int, Callable[[], None]]]) -> None:
    """Run all tasks, small ones grouped together, and return when they are done.

    Args:
        workers: The threads that do them.
        tasks: Each with the bytes that it works on.
    """
    jobs = []
    together: list[Callable[[], None]] = []
    nbytes = 0
    for more, task in tasks:
        together.append(task)
        nbytes += more
        if nbytes >= defaults.SCAN_JOB_BYTES:
            jobs.append(workers.start(partial(_do, together)))
            together, nbytes = [], 0
    _do(together)
    for job in jobs:
        job.result()


def _do(tasks: Sequence[Callable[[], None]]) -> None:
    with torch.inference_mode(mode=False), torch.no_grad():
        for task in tasks:
            task()
