"""Reads checkpoints piece by piece through a fixed gate and hands each piece to whoever hashes, counts or compares.

Pieces come in batches: while one batch is worked on, the engine reads the next. What is done with the pieces of a batch
is divided over the processors. Two batches and the staging buffers of one plan are all the memory that this takes,
whatever the size of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from sluice import _options as options
from sluice._errors import LimitError
from sluice._geometry import contiguous_stride, round_down
from sluice._threads import Job, Workers
from sluice.engine.session import execute
from sluice.engine.targets import Targets
from sluice.machine.facts import machine_facts
from sluice.planning.memory_layout import single_targets
from sluice.planning.planner import plan_load
from sluice.records import Entry, Request, Storage, elements_of

if TYPE_CHECKING:
    from sluice.checkpoint.open_checkpoint import OpenCheckpoint

__all__ = [
    "Batch",
    "Piece",
    "PieceReader",
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


@dataclass(frozen=True, slots=True)
class Piece(Generic[_Item]):
    """Something to read, and what it is for."""

    #: A tensor, or a part of one, that fits a batch.
    entry: Entry
    #: Whatever the caller wants to know when it was read.
    item: _Item


Batch = list[Piece[_Item]]


class PieceReader:
    """Reads entries of one checkpoint as row-major tensors, and ranges of its files as bytes."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        """Ask the machine, once for all batches."""
        self._checkpoint = checkpoint
        self._facts = machine_facts(checkpoint.sources)
        own = checkpoint.index
        self._first_file = len(own.storages)
        files = (
            Storage(file=position, offset=0, nbytes=file.identity.nbytes, key=file.path)
            for position, file in enumerate(own.files)
        )
        self._index = replace(own, storages=(*own.storages, *files))

    @property
    def cores(self) -> int:
        """Processors that this process may use."""
        return self._facts.cores

    def window(self, file: int, first: int, end: int) -> Entry:
        """Return an entry for the bytes of a file from ``first`` to ``end``."""
        storage = self._first_file + file
        return Entry(
            elements=elements_of("uint8"), shape=(end - first,), stride=(1,), storage=storage, storage_offset=first
        )

    def read(self, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Return the tensors of a batch, each row-major, in memory that lives as long as they do.

        Raises:
            FormatError: A header in front of the data is damaged.
            ReadError: The operating system failed a read.
            SourceChangedError: A file is no longer the one that was indexed.
        """
        offsets = self._checkpoint.locate(
            {number for entry in entries if entry.numel for number in entry.storages if number < self._first_file}
        )
        requests = [
            Request(name="", entry=entry, dtype=entry.dtype, device="cpu", stride=contiguous_stride(entry.shape))
            for entry in entries
        ]
        laid_out, views = single_targets(requests, self._index, offsets)
        plan = plan_load(laid_out, self._index.files, self._facts, staging_bytes=options.SCAN_STAGING_BYTES)
        targets = Targets(plan)
        execute(plan, self._checkpoint.sources, targets)
        return targets.tensors(views)


def row_major(entry: Entry) -> bool:
    """Return whether the bytes of an entry lie in a file as those of a contiguous tensor do."""
    if entry.parts or entry.composite is not None or entry.elements.computed or entry.constant is not None:
        return False
    steps = zip(entry.shape, entry.stride, contiguous_stride(entry.shape), strict=True)
    return 0 in entry.shape or all(size == 1 or step == dense for size, step, dense in steps)


def identity(entry: Entry) -> object:
    """Return what tells tensors of one checkpoint apart by what they hold: several names of one are read once."""
    if entry.parts or entry.composite is not None:
        return id(entry)
    return entry.storage, entry.storage_offset, entry.elements, entry.shape, entry.stride


def check_repeats(checkpoint: OpenCheckpoint, name: str, entry: Entry) -> None:
    """Refuse a tensor that a stride of 0 makes so much larger than what is stored that reading it would not end.

    Raises:
        LimitError: It is such a tensor.
    """
    stored = sum(checkpoint.index.storages[number].nbytes for number in entry.storages)
    if entry.nbytes > options.SCAN_REPEATS * max(1 << 20, stored):
        raise LimitError(
            "this tensor repeats its stored elements too often to be read one by one",
            file=checkpoint.path,
            tensor=name,
            expected=f"at most {options.SCAN_REPEATS} times",
            found=f"{entry.nbytes} bytes",
        )


def windows(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges in which a file is read: begin and end of each, inner boundaries on a grid."""
    while first < end:
        last = min(end, round_down(first, options.SCAN_WINDOW_BYTES) + options.SCAN_WINDOW_BYTES)
        yield first, last
        first = last


def in_batches(pieces: Iterable[Piece[_Item]], batch_bytes: int) -> Iterator[Batch[_Item]]:
    """Yield the pieces in batches of at most ``batch_bytes``, each at least one piece."""
    batch: Batch[_Item] = []
    nbytes = 0
    for piece in pieces:
        more = piece.entry.nbytes
        if batch and (nbytes + more > batch_bytes or len(batch) == options.SCAN_BATCH_PIECES):
            yield batch
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += more
    if batch:
        yield batch


def pipeline(
    batches: Iterable[Batch[_Item]],
    read: Callable[[Batch[_Item]], _Read],
    use: Callable[[Batch[_Item], _Read], None],
) -> None:
    """Read every batch and use it, in order; while one is used, the next is read by another thread.

    What either raises is raised here, when both are done with what they were doing.
    """
    with Workers(1, "sluice-ahead") as ahead:
        waiting: tuple[Batch[_Item], Job[_Read]] | None = None
        for batch in batches:
            following = batch, ahead.start(partial(read, batch))
            if waiting is not None:
                use(waiting[0], waiting[1].result())
            waiting = following
        if waiting is not None:
            use(waiting[0], waiting[1].result())


def work_through(workers: Workers, tasks: Iterable[tuple[int, Callable[[], None]]]) -> None:
    """Do all tasks, small ones together, and return when they are done.

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
        if nbytes >= options.SCAN_JOB_BYTES:
            jobs.append(workers.start(partial(_do, together)))
            together, nbytes = [], 0
    _do(together)
    for job in jobs:
        job.result()


def _do(tasks: Sequence[Callable[[], None]]) -> None:
    with torch.inference_mode(mode=False), torch.no_grad():
        for task in tasks:
            task()
