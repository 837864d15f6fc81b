"""Contents of a conversion: the tensors of a checkpoint, which are read in batches in the order of the new file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Self

import torch
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES, is_castable
from sluice._options import PageCache
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.contents import refuse_repeats
from sluice.converting.storages import Storages
from sluice.entries.slicing import boxes, slice_entry
from sluice.entries.tree import flatten
from sluice.reading.reader import CheckpointReader
from sluice.records import Entry
from sluice.writing.contents import WrittenItem, stored_once
from sluice.writing.pickle_walk import walk_object
from sluice.writing.safetensors import TensorOutline
from sluice.writing.torch_pickle import is_plain, pickle_object, refusal
from sluice.writing.torch_zip import TorchFile

__all__ = ["Entries", "finished_dtype"]


def finished_dtype(entry: Entry, dtype: str | None) -> str:
    """Return the dtype of an entry in the new file, if real floats are cast to ``dtype``."""
    return entry.cast or (dtype if dtype is not None and is_castable(entry.dtype) else entry.dtype)


class Entries:
    """Entries of a checkpoint; see ``Contents``. Reads in its ``with`` block."""

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        tree: object,
        dtype: str | None,
        *,
        batch_bytes: int,
        staging_bytes: int,
        page_cache: PageCache,
    ) -> None:
        """Read nothing yet.

        Args:
            checkpoint: The source.
            tree: An object with its entries.
            dtype: Dtype that real floating-point tensors are cast to; None keeps each dtype.
            batch_bytes: Bytes of entries that are read at once. One batch is written while the next is read.
            staging_bytes: Bytes of the buffers of reads.
            page_cache: Use of the page cache.
        """
        self.tree = tree
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._batch_bytes = batch_bytes
        self._staging_bytes = staging_bytes
        self._page_cache: PageCache = page_cache
        self._reader = CheckpointReader(checkpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)

    @property
    def host_headroom(self) -> tuple[int, str]:
        """Host memory that may be used, in bytes, and what limits it."""
        return self._reader.facts.host_headroom

    def finished(self, entry: Entry) -> str:
        """Return the dtype of an entry in the file."""
        return finished_dtype(entry, self._dtype)

    def named(self) -> Mapping[str, Entry]:
        return flatten(self.tree, self._checkpoint.limits)

    def distinct(self) -> tuple[dict[str, Entry], dict[str, str]]:
        assert isinstance(self.tree, dict)
        stored, ties = stored_once(self.tree, _identity)
        refuse_repeats(stored, self._checkpoint)
        self._locate(stored.values())
        return stored, ties

    def outlines(self, tensors: Mapping[str, Entry]) -> dict[str, TensorOutline]:
        return {name: TensorOutline(self.finished(entry), entry.shape) for name, entry in tensors.items()}

    def casts(self, tensors: Iterable[Entry]) -> Mapping[str, int]:
        pairs = ((entry.dtype, self.finished(entry)) for entry in tensors)
        return Counter(f"{own} -> {finished}" for own, finished in pairs if own != finished)

    def lay_out(self, obj: object, named: Mapping[str, Entry]) -> TorchFile:
        walked = walk_object(obj, _attributes)
        self._locate(walked.tensors)
        storages = Storages(walked.tensors, self.finished, self._checkpoint.index)
        return TorchFile(
            pickled=pickle_object(obj, walked, storages.described()),
            storages=storages.sources,
            sizes=storages.sizes,
            tensors=walked.places,
            casts=self.casts(walked.tensors),
            hashed=storages.hashed(named),
        )

    def pieces(
        self, items: Iterable[WrittenItem], drain: Callable[[], None]
    ) -> Iterator[tuple[WrittenItem, torch.Tensor]]:
        pending = None
        for batch in chain(self._batches(items), (None,)):
            started = None
            if batch is not None:
                entries = [entry for _, entry in batch]
                running = self._reader.start(entries, staging_bytes=self._staging_bytes, page_cache=self._page_cache)
                started = [item for item, _ in batch], running
                del running
            if pending is not None:
                yield from zip(pending[0], pending[1].result(), strict=True)
                pending = None
                drain()  # the memory of the batch is free now
            pending = started

    def _batches(self, items: Iterable[WrittenItem]) -> Iterator[list[tuple[WrittenItem, Entry]]]:
        batch: list[tuple[WrittenItem, Entry]] = []
        nbytes = fills = 0
        for item in items:
            for piece in self._cut(item.source):
                more = max(1, len(piece.parts))
                if batch and (nbytes + piece.nbytes > self._batch_bytes or fills + more > defaults.SCAN_BATCH_PIECES):
                    yield batch
                    batch, nbytes, fills = [], 0, 0
                batch.append((item, piece))
                nbytes += piece.nbytes
                fills += more
        if batch:
            yield batch

    def _cut(self, entry: Entry) -> Iterator[Entry]:
        if entry.nbytes <= self._batch_bytes:
            yield entry
            return
        # Packs are decoded as a whole. The sizes of all are powers of two.
        whole = max(1 if (packing := piece.elements.packing) is None else packing.elements for piece in entry.pieces)
        for key in boxes(entry.shape, self._batch_bytes // ITEM_BYTES[entry.dtype], whole):
            yield slice_entry(entry, key)

    def _locate(self, entries: Iterable[Entry]) -> None:
        """Check the headers of all data before anything is written."""
        self._checkpoint.locate({number for entry in entries if entry.numel for number in entry.storages})


def _attributes(value: object) -> Mapping[str, object] | None:
    if isinstance(value, Entry):
        return value.attributes or {}
    if is_plain(value):
        return None
    raise refusal(value)


def _identity(entry: Entry) -> Entry | None:
    return replace(entry, parameter=False, requires_grad=False, origin="") if entry.numel else None
