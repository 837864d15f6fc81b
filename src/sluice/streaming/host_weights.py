"""Weights of a stream that rest in host memory: the bytes of their reads are kept from the first one.

They are kept as they are in the file, in front of its sources, so that plans, decoders, casts and copies to a device
are those of weights on the disk. A file that changes is still noticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from sluice import _defaults as defaults
from sluice.engine.host_memory import HostMemory
from sluice.records import Read
from sluice.records.geometry import round_down, round_up
from sluice.sources.protocol import Source
from sluice.sources.wrappers import ForwardingSource

__all__ = ["HostWeights", "resting_bytes"]


def resting_bytes(reads: Iterable[Read]) -> int:
    """Return the bytes of host memory that reads take: whole blocks, as direct reads bring them."""
    return sum(_blocks(read)[1] for read in reads)


class HostWeights:
    """The files of a checkpoint, and the bytes of some reads of them."""

    def __init__(self, sources: Sequence[Source], reads: Iterable[Read], *, huge_pages: bool) -> None:
        """Keep nothing yet.

        Args:
            sources: The files.
            reads: The reads whose bytes are kept.
            huge_pages: Whether they are kept on huge pages.
        """
        by_file = defaultdict[int, list[Read]](list)
        for read in reads:
            by_file[read.file].append(read)
        self._kept = {file: _KeptReads(sources[file], each, huge_pages=huge_pages) for file, each in by_file.items()}
        #: The files; the kept reads do not reach them.
        self.sources = tuple(self._kept.get(number, source) for number, source in enumerate(sources))

    def missing_bytes(self, reads: Iterable[Read]) -> int:
        """Return the bytes of reads that are not here yet: they reach the files."""
        return sum(read.nbytes for read in reads if read.file not in self._kept or not self._kept[read.file].has(read))

    def clear(self) -> None:
        """Free the memory; nothing is being read."""
        for kept in self._kept.values():
            kept.clear()


class _Rest(Struct, eq=False):
    """The bytes of one read, once it was made."""

    first: int = 0
    #: A view of memory that it alone keeps.
    bytes: memoryview = memoryview(b"")

    def part(self, offset: int, nbytes: int) -> memoryview | None:
        """Return a part by its offset in the file; None if not all of it is here."""
        start = offset - self.first
        return self.bytes[start : start + nbytes] if 0 <= start <= len(self.bytes) - nbytes else None


class _KeptReads(ForwardingSource):
    """One file, and the bytes of some reads of it; each of them is made by one thread at a time."""

    def __init__(self, source: Source, reads: Iterable[Read], *, huge_pages: bool) -> None:
        super().__init__(source)
        self._huge_pages = huge_pages
        #: The rest of each read by offset and size, as it is requested buffered and as it is requested directly.
        self._rests: dict[tuple[int, int], _Rest] = {}
        for read in reads:
            rest = self._rests.setdefault((read.offset, read.nbytes), _Rest())
            self._rests.setdefault(_blocks(read), rest)

    def has(self, read: Read) -> bool:
        """Return whether the bytes of a read are here."""
        rest = self._rests.get((read.offset, read.nbytes))
        return rest is not None and rest.part(read.offset, read.nbytes) is not None

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        rest = self._rests.get((offset, len(buffer)))
        if rest is None:
            return self._source.read_into(offset, buffer, direct=direct)
        # The last block of a file is shorter than what is requested.
        nbytes = max(0, min(len(buffer), self.identity.nbytes - offset))
        part = rest.part(offset, nbytes)
        if part is not None:
            _copy(buffer[:nbytes], part)
            return nbytes
        found = self._source.read_into(offset, buffer, direct=direct)
        if found == nbytes:
            kept = HostMemory(nbytes, huge_pages=self._huge_pages).view()[:nbytes]
            _copy(kept, buffer[:nbytes])
            rest.first, rest.bytes = offset, kept  # once all of it is there
        return found

    def clear(self) -> None:
        """Free the memory."""
        for rest in self._rests.values():
            rest.bytes = memoryview(b"")


def _blocks(read: Read) -> tuple[int, int]:
    """Return offset and size of the blocks of a read."""
    first = round_down(read.offset, defaults.BLOCK_BYTES)
    return first, round_up(read.offset + read.nbytes, defaults.BLOCK_BYTES) - first


def _copy(target: memoryview, source: memoryview) -> None:
    # Not a slice assignment, which holds the interpreter lock.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
