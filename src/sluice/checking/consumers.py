"""Consumers of verified bytes: checksums, hashes, counters, and buffers that restore the order of elements."""

from __future__ import annotations

import dataclasses
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from msgspec import Struct, field
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice._geometry import span_elements
from sluice.checking.non_finite import NonFiniteCounter, WholeItems
from sluice.checking.read_order import FileRange
from sluice.engine.elementwise import cast
from sluice.engine.host_copies import BITS, StridedBytes, copy_in_pieces
from sluice.engine.host_memory import HostMemory
from sluice.engine.packs import decode_packs
from sluice.formats.manifest import Hasher
from sluice.formats.protocol import Checksum
from sluice.records import Entry, Packing, Part, Quantized

__all__ = [
    "ByteStream",
    "ByteSwapped",
    "Consumer",
    "Decoded",
    "RecordChecksum",
    "Tee",
    "TensorAssembler",
    "TensorCheck",
    "bytes_of",
    "feed",
]

#: Held while tensors are assembled: that takes memory, so one thread does it at a time.
_ASSEMBLING = threading.Lock()


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
    """Ranges of files that are consumed one after the other."""

    #: Ranges in the order of consumption; empty if the bytes are read entry by entry instead.
    ranges: tuple[FileRange, ...] = ()
    #: Consumer of each range.
    consumers: tuple[Consumer, ...] = ()
    #: Whether a range could not be read.
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
        self.stream = ByteStream((FileRange(self.file, first, first + self.checksum.nbytes),), (self,))

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
    #: Whether it is read entry by entry, for its only stream.
    apart: bool = False

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


def feed(pieces: Iterable[tuple[Consumer, memoryview]]) -> None:
    """Pass each piece to its consumer, in order."""
    for consumer, data in pieces:
        consumer.update(data)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a row-major tensor."""
    return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


class ByteSwapped:
    """Passes big-endian items on as little-endian ones."""

    def __init__(self, consumer: Consumer, item_bytes: int) -> None:
        """Start a stream.

        Args:
            consumer: Receives the swapped items.
            item_bytes: Bytes of one item.
        """
        self._taker = consumer
        self._item = item_bytes
        self._items = WholeItems(item_bytes)

    def update(self, data: memoryview) -> None:
        """Receive the next bytes, which may begin and end inside an item."""
        step = defaults.MOVED_BYTES // self._item * self._item
        for whole in self._items.take(data):
            for first in range(0, len(whole), step):
                swapped = np.frombuffer(whole[first : first + step], dtype=f"u{self._item}").byteswap()
                self._taker.update(memoryview(swapped.view(np.uint8).data))


class Decoded:
    """Passes packs on as the bytes of their elements."""

    def __init__(self, consumer: Consumer, packing: Packing) -> None:
        """Start a stream.

        Args:
            consumer: Receives the elements.
            packing: The code of the packs.
        """
        self._taker = consumer
        self._packing = replace(packing, taken=packing.elements)
        self._packs = WholeItems(packing.nbytes)

    def update(self, data: memoryview) -> None:
        """Receive the next bytes, which may begin and end inside a pack."""
        packing = self._packing
        step = max(1, defaults.CAST_PIECE_ELEMENTS // packing.elements) * packing.nbytes
        for whole in self._packs.take(data):
            for first in range(0, len(whole), step):
                packs = torch.frombuffer(bytearray(whole[first : first + step]), dtype=torch.uint8)
                elements = torch.empty(len(packs) // packing.nbytes, packing.elements)
                decode_packs(elements, packs.view(-1, packing.nbytes), packing, cast)
                self._taker.update(bytes_of(elements))


class TensorAssembler:
    """Buffers the bytes of small tensors, then arranges each in the order of its elements."""

    def __init__(
        self,
        components: Sequence[Entry],
        locate: Callable[[Entry], FileRange],
        swapped: Callable[[Entry], int],
        done: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        """Start with an empty buffer.

        Args:
            components: Dense tensors.
            locate: Returns the file range of a view of a storage.
            swapped: Returns the item size of a view that is stored big-endian, or 0.
            done: Receives the tensors, row-major, after the last byte.
        """
        self._components = components
        self._locate = locate
        self._swapped = swapped
        self._done = done
        self._begins: dict[FileRange, int] = {}
        # Separate mappings, because the heap often keeps freed memory.
        self._buffer: HostMemory | None = None
        self._received_bytes = 0
        #: Bytes of ``ranges``.
        self.nbytes = 0
        pieces = [piece for component in components for piece in component.pieces if piece.numel]
        #: Ranges of files that it receives, in order.
        self.ranges = tuple(_joined(sorted(locate(piece) for piece in pieces)))
        for each in self.ranges:
            self._begins[each] = self.nbytes
            self.nbytes += each.nbytes

    def update(self, data: memoryview) -> None:
        """Receive the next bytes."""
        if not self._received_bytes and len(data) == self.nbytes:
            self._finish(data)
            return
        if self._buffer is None:
            self._buffer = HostMemory(self.nbytes, huge_pages=False)
        self._buffer.view()[self._received_bytes : self._received_bytes + len(data)] = data
        self._received_bytes += len(data)
        if self._received_bytes == self.nbytes:
            self._finish(self._buffer.view()[: self.nbytes])
            self._buffer = None

    def _finish(self, data: memoryview) -> None:
        with _ASSEMBLING:
            raw = torch.from_numpy(np.frombuffer(data, dtype=np.uint8))
            self._done([self._assembled(component, raw) for component in self._components])

    def _assembled(self, entry: Entry, raw: torch.Tensor) -> torch.Tensor:
        item = ITEM_BYTES[entry.dtype]
        computed = any(piece.math_bits for piece in entry.pieces)
        dtype = torch_dtype(entry.dtype) if computed else BITS[item]
        if not entry.numel:
            return torch.empty(entry.shape, dtype=dtype)
        memory = HostMemory(entry.numel * item, huge_pages=False)
        out = torch.frombuffer(memory.mapping, dtype=dtype, count=entry.numel, offset=memory.start).view(entry.shape)
        for part in entry.parts or (Part(entry=entry, start=(0,) * len(entry.shape)),):
            piece = part.entry
            if not piece.numel:
                continue
            each = self._locate(piece)
            whole = next(
                whole for whole in self.ranges if whole.file == each.file and whole.first <= each.first < whole.end
            )
            first = self._begins[whole] + each.first - whole.first
            own = raw[first : first + span_elements(piece.shape, piece.stride) * item]
            swap_bytes = self._swapped(piece)
            if swap_bytes:
                own = torch.from_numpy(own.numpy().view(f"u{swap_bytes}").byteswap().view(np.uint8))
            box = tuple(slice(start, start + size) for start, size in zip(part.start, piece.shape, strict=True))
            copy_in_pieces(out[box], StridedBytes(own, dtype, piece.shape, piece.stride, piece.elements))
        return out


def _joined(ranges: Iterable[FileRange]) -> list[FileRange]:
    """Return ascending ranges, with overlapping ones joined."""
    joined: list[FileRange] = []
    for each in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.file == each.file and each.first <= last.end:
            joined[-1] = FileRange(last.file, last.first, max(last.end, each.end))
        else:
            joined.append(each)
    return joined
