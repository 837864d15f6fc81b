"""Consumers of verified bytes: checksums, hashes and counters, and decoders before them."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from msgspec import Struct, field

from sluice import _defaults as defaults
from sluice._errors import FormatError
from sluice.checking.non_finite import NonFiniteCounter, WholeItems
from sluice.engine.packs import decode_packs
from sluice.formats.manifest import Hasher
from sluice.formats.protocol import Checksum
from sluice.reading.sparse_indices import check_indices, index_lines
from sluice.records import Entry, Packing, Quantized, Sparse
from sluice.reports.verify import VerifyProblem

__all__ = [
    "ByteStream",
    "ByteSwapped",
    "Consumer",
    "Decoded",
    "IndexCheck",
    "RecordChecksum",
    "Tee",
    "TensorCheck",
    "bytes_of",
]


class Consumer(Protocol):
    """Receives bytes in order."""

    def update(self, data: memoryview, /) -> None: ...


class Tee:
    """Passes bytes on to several consumers."""

    def __init__(self, consumers: Sequence[Consumer]) -> None:
        self._takers = consumers

    def update(self, data: memoryview) -> None:
        """Receive the next bytes."""
        for consumer in self._takers:
            consumer.update(data)


class ByteStream(Struct, eq=False):
    """Bytes that a consumer receives in order: a range of a file, or the elements of a tensor that is read apart."""

    #: Position of the file; -1 for a tensor that is read apart.
    file: int = -1
    #: First byte of the range, and byte after the last.
    first: int = 0
    end: int = 0
    #: Receives the bytes of the range.
    consumer: Consumer | None = None
    #: Whether some could not be read.
    failed: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class RecordChecksum:
    """The CRC-32 of a record, computed and recorded."""

    #: Position of the file.
    file: int
    #: Checksum recorded in the file, and the range that it covers.
    checksum: Checksum
    #: CRC-32 of the bytes so far.
    value: int = 0
    #: Range of the record.
    stream: ByteStream = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        first = self.checksum.offset
        self.stream = ByteStream(self.file, first, first + self.checksum.nbytes, self)

    def update(self, data: memoryview) -> None:
        """Receive the next bytes."""
        self.value = zlib.crc32(data, self.value)


class TensorCheck(Struct, eq=False):
    """The hash and the counts of one tensor, under all its names."""

    #: The tensor.
    entry: Entry
    #: Its names.
    names: list[str] = field(default_factory=list)
    #: Hash of its elements; None if not requested.
    hasher: Hasher | None = None
    #: Counter of its non-finite elements; None if not requested.
    counter: NonFiniteCounter | None = None
    #: Streams of its bytes, for the hash and for the counter; empty if a damaged header hides some of them.
    streams: tuple[ByteStream, ...] = ()

    @property
    def apart(self) -> bool:
        """Whether it is read entry by entry, for its only stream, because its elements are not in order in a file."""
        return any(stream.file < 0 for stream in self.streams)

    @property
    def whole(self) -> bool:
        """Whether all of its bytes were read."""
        return bool(self.streams) and not any(stream.failed for stream in self.streams)

    def consumer(self, component: Entry) -> Consumer:
        """Return the consumer of one dense component; the tensor itself if it is dense."""
        composite = self.entry.composite
        counted = composite is None or component is composite.values
        consumers = (self.hasher, self.counter if counted else None)
        return Tee([consumer for consumer in consumers if consumer is not None])

    def finish(self) -> None:
        """Hash the scales and zero points of a quantized tensor that are plain numbers."""
        composite = self.entry.composite
        if isinstance(composite, Quantized) and self.hasher:
            for numbers in (composite.scales, composite.zero_points):
                if isinstance(numbers, tuple):
                    self.hasher.update(struct.pack(f"<{len(numbers)}d", *numbers))


class IndexCheck(Struct, eq=False):
    """The indices of one sparse tensor."""

    #: Its first name.
    name: str
    #: The tensor.
    entry: Entry
    #: Its components.
    composite: Sparse

    def problem(self, elements: Callable[[Entry, int], Iterable[torch.Tensor]], file: str) -> VerifyProblem | None:
        """Return what is wrong with them.

        Args:
            elements: Reads the elements of a part in order, in pieces of at most a number of bytes.
            file: The checkpoint, for messages.
        """
        lines = index_lines(self.composite)
        limit_bytes = defaults.SCAN_BATCH_BYTES // max(1, len(lines))
        try:
            check_indices(self.entry, [elements(line, limit_bytes) for line in lines])
        except FormatError as error:
            error.file, error.tensor = file, self.name
            return VerifyProblem.of(error)
        return None


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a row-major tensor."""
    return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


def _pieces(items: WholeItems, data: memoryview, step: int) -> Iterator[memoryview]:
    """Yield the complete items of bytes that may begin and end inside an item, in pieces of at most ``step`` bytes."""
    for whole in items.take(data):
        for first in range(0, len(whole), step):
            yield whole[first : first + step]


class ByteSwapped:
    """Passes big-endian items on as little-endian ones."""

    def __init__(self, consumer: Consumer, item_bytes: int) -> None:
        """Start a stream of items of ``item_bytes`` bytes for a consumer."""
        self._taker = consumer
        self._item = item_bytes
        self._items = WholeItems(item_bytes)

    def update(self, data: memoryview) -> None:
        """Receive the next bytes."""
        for piece in _pieces(self._items, data, defaults.MOVED_BYTES // self._item * self._item):
            swapped = np.frombuffer(piece, dtype=f"u{self._item}").byteswap()
            self._taker.update(memoryview(swapped.view(np.uint8).data))


class Decoded:
    """Passes packs on as the bytes of their elements."""

    def __init__(self, consumer: Consumer, packing: Packing) -> None:
        """Start a stream of packs of some code for a consumer."""
        self._taker = consumer
        self._packing = packing
        self._packs = WholeItems(packing.nbytes)

    def update(self, data: memoryview) -> None:
        """Receive the next bytes."""
        packing = self._packing
        step = max(1, defaults.CAST_PIECE_ELEMENTS // packing.elements) * packing.nbytes
        for piece in _pieces(self._packs, data, step):
            packs = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            elements = torch.empty(len(packs) // packing.nbytes, packing.elements)
            decode_packs(elements, packs.view(-1, packing.nbytes), packing)
            self._taker.update(bytes_of(elements))
