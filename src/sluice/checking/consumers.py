"""What takes the bytes of a verification: checksums, hashes, counts, and what brings bytes into order first."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice._geometry import span_elements
from sluice.checking.non_finite import NonFiniteCounter, WholeItems
from sluice.checking.read_order import Span
from sluice.engine.host_copies import BITS, StridedBytes, copy_in_pieces
from sluice.engine.host_memory import HostMemory
from sluice.formats.manifest import Hasher
from sluice.formats.protocol import Checksum
from sluice.records import Entry, Part, Quantized

__all__ = ["Content", "Crc", "Flow", "Gathering", "Several", "Taker", "Turned", "bytes_of", "feed"]

#: Arrangements take memory, so that one is made at a time, whatever the number of processors.
_ARRANGING = threading.Lock()


class Taker(Protocol):
    """Takes bytes in order."""

    def update(self, data: memoryview, /) -> None: ...


class Several:
    """Passes bytes on to each of several takers."""

    def __init__(self, takers: Sequence[Taker]) -> None:
        self._takers = takers

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        for taker in self._takers:
            taker.update(data)


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes that are taken one after the other, and whether all of them came."""

    #: What is wanted, in order; empty for what is not read as it lies in the files.
    spans: tuple[Span, ...] = ()
    #: Who takes each of them.
    takers: tuple[Taker, ...] = ()
    #: Whether some of them could not be read.
    failed: bool = False


@dataclass(slots=True, eq=False)
class Crc:
    """The CRC-32 of a record."""

    #: Position of the file.
    file: int
    #: What the file says.
    checksum: Checksum
    #: What was found.
    value: int = 0
    #: How its bytes come.
    flow: Flow = field(init=False)

    def __post_init__(self) -> None:
        first = self.checksum.offset
        self.flow = Flow((Span(self.file, first, first + self.checksum.nbytes),), (self,))

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        self.value = zlib.crc32(data, self.value)


@dataclass(slots=True, eq=False)
class Content:
    """What is found out of one tensor, whatever its names."""

    #: The tensor.
    entry: Entry
    #: Its names.
    names: list[str] = field(default_factory=list)
    #: Where hashes are wanted.
    hasher: Hasher | None = None
    #: Where its elements are counted.
    counter: NonFiniteCounter | None = None
    #: How its bytes come, to the hash and to the counter apart; none where some lie behind damaged headers.
    flows: tuple[Flow, ...] = ()
    #: Whether it is read by itself, for its only flow.
    apart: bool = False

    @property
    def whole(self) -> bool:
        """Whether all of its bytes came."""
        return bool(self.flows) and not any(flow.failed for flow in self.flows)

    def taker(self, component: Entry) -> Taker:
        """Return what takes the bytes of one of the dense tensors that it is made of: of itself, where it is dense."""
        composite = self.entry.composite
        counted = composite is None or component is composite.values
        wanted = (self.hasher, self.counter if counted else None)
        return Several([taker for taker in wanted if taker is not None])

    def finish(self) -> None:
        """Hash what a quantized tensor keeps as plain numbers."""
        composite = self.entry.composite
        if isinstance(composite, Quantized) and self.hasher:
            for numbers in (composite.scales, composite.zero_points):
                if isinstance(numbers, tuple):
                    self.hasher.update(struct.pack(f"<{len(numbers)}d", *numbers))


def feed(pieces: Iterable[tuple[Taker, memoryview]]) -> None:
    """Give each piece to its taker, in order."""
    for taker, data in pieces:
        taker.update(data)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a row-major tensor."""
    return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


class Turned:
    """Passes on numbers with the least significant byte first that come with the most significant one first."""

    def __init__(self, taker: Taker, item_bytes: int) -> None:
        """Begin with nothing.

        Args:
            taker: Who gets them.
            item_bytes: Bytes of one number.
        """
        self._taker = taker
        self._item = item_bytes
        self._items = WholeItems(item_bytes)

    def update(self, data: memoryview) -> None:
        """Take the next bytes, which may begin and end inside a number."""
        step = options.MOVED_BYTES // self._item * self._item
        for whole in self._items.take(data):
            for first in range(0, len(whole), step):
                turned = np.frombuffer(whole[first : first + step], dtype=f"u{self._item}").byteswap()
                self._taker.update(memoryview(turned.view(np.uint8).data))


class Gathering:
    """Holds the bytes of small tensors until all are there, then arranges each in the order of its elements."""

    def __init__(
        self,
        components: Sequence[Entry],
        locate: Callable[[Entry], Span],
        turn: Callable[[Entry], int],
        done: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        """Begin with nothing.

        Args:
            components: Dense tensors.
            locate: Returns where a view of a storage lies.
            turn: Returns the bytes of each number of a view that is stored with the most significant byte first, or 0.
            done: Gets them, row-major, when the last byte has come.
        """
        self._components = components
        self._locate = locate
        self._turn = turn
        self._done = done
        self._begins: dict[Span, int] = {}
        # Mappings of their own, because what the heap is given back it often keeps.
        self._held: HostMemory | None = None
        self._come = 0
        #: Bytes that it takes.
        self.nbytes = 0
        pieces = [piece for component in components for piece in component.pieces if piece.numel]
        #: What it takes, in order.
        self.spans = tuple(_joined(sorted(locate(piece) for piece in pieces)))
        for span in self.spans:
            self._begins[span] = self.nbytes
            self.nbytes += span.nbytes

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        if not self._come and len(data) == self.nbytes:
            self._finish(data)
            return
        if self._held is None:
            self._held = HostMemory(self.nbytes, huge_pages=False)
        self._held.view()[self._come : self._come + len(data)] = data
        self._come += len(data)
        if self._come == self.nbytes:
            self._finish(self._held.view()[: self.nbytes])
            self._held = None

    def _finish(self, data: memoryview) -> None:
        with _ARRANGING:
            raw = torch.from_numpy(np.frombuffer(data, dtype=np.uint8))
            self._done([self._arranged(component, raw) for component in self._components])

    def _arranged(self, entry: Entry, raw: torch.Tensor) -> torch.Tensor:
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
            span = self._locate(piece)
            whole = next(one for one in self.spans if one.file == span.file and one.first <= span.first < one.end)
            first = self._begins[whole] + span.first - whole.first
            own = raw[first : first + span_elements(piece.shape, piece.stride) * item]
            turn = self._turn(piece)
            if turn:
                own = torch.from_numpy(own.numpy().view(f"u{turn}").byteswap().view(np.uint8))
            box = tuple(slice(start, start + size) for start, size in zip(part.start, piece.shape, strict=True))
            copy_in_pieces(out[box], StridedBytes(own, dtype, piece.shape, piece.stride, piece.elements))
        return out


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return ascending spans with those joined that overlap."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.file == span.file and span.first <= last.end:
            joined[-1] = Span(last.file, last.first, max(last.end, span.end))
        else:
            joined.append(span)
    return joined
