"""Sources that are computed or in memory, and reads of many small ranges.

Of many ranges, close ones are one read, and distant ones are read in several threads.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from sluice._errors import SourceChangedError, TruncatedError
from sluice._threads import Workers, spare_threads
from sluice.records import AccessFacts, FileIdentity, FileRecord, local_access
from sluice.sources.protocol import Source, checks_with_data
from sluice.sources.wrappers import RangedSource

if TYPE_CHECKING:
    from sluice.checkpoint.open_checkpoint import OpenCheckpoint

__all__ = ["ComputedSource", "MemoryFile", "read_ranges"]

#: Most bytes of one read for several ranges, 8 MiB over all threads.
_SPAN_BYTES = 1 << 20

#: Most bytes of a read into memory of its own.
_SMALL_BYTES = 64 << 10

#: Fewest reads for which threads pay: starting them takes about as long as reading eight cold pages.
_READS_FOR_THREADS = 8

#: Seconds for which the caller reads alone, about as long as threads take to start: 100 cached headers need no threads.
_ALONE_SECONDS = 0.002


class ComputedSource(RangedSource):
    """See ``Source``; subclasses compute the bytes of buffers."""

    #: Ranges that are computed at once.
    at_once: ClassVar[int] = 1
    #: Host memory of the computation, in bytes.
    working_bytes: int = 0
    #: Files of which alone its bytes follow; empty if they depend on more.
    origins: tuple[FileRecord, ...] = ()

    def __init__(self, path: str, inputs: OpenCheckpoint, nbytes: int) -> None:
        """Compute nothing yet; ``path`` is a name for messages."""
        self.path, self.inputs = path, inputs
        self.identity = FileIdentity(nbytes=nbytes)

    @property
    def access(self) -> AccessFacts:
        """See ``Source``: each thread keeps freed memory of what it has computed, so that they are few."""
        return replace(local_access(), parallel_requests=self.at_once)

    def check_unchanged(self) -> None:
        """See ``Source``: of all inputs."""
        for source in self.inputs.sources:
            source.check_unchanged()


class MemoryFile(RangedSource):
    """The content of a ``BytesIO``, which is not copied; see ``Source``."""

    def __init__(self, stream: io.BytesIO) -> None:
        """Keep the stream; its position is ignored and does not change."""
        self.path = "<memory>"
        self._stream = stream
        self.identity = FileIdentity(nbytes=self._nbytes())
        if not self.identity.nbytes:
            raise TruncatedError("the file is empty", file=self.path)

    @property
    def access(self) -> AccessFacts:
        return local_access()

    def fill_buffer(self, offset: int, buffer: memoryview) -> None:
        self.check_unchanged()
        # The view must end with this call: a stream with an open view cannot be written to.
        with self._stream.getbuffer() as content:
            buffer[:] = content[offset : offset + len(buffer)]

    def check_unchanged(self) -> None:
        found = FileIdentity(nbytes=self._nbytes())
        if found != self.identity:
            was, now = self.identity.describe(), found.describe()
            raise SourceChangedError("the stream changed", file=self.path, expected=was, found=now)

    def _nbytes(self) -> int:
        with self._stream.getbuffer() as content:
            return content.nbytes


def read_ranges(
    source: Source, starts: Sequence[int], sizes: Sequence[int], *, gap_bytes: int | None = None
) -> list[bytes]:
    """Return the bytes of each range.

    Args:
        source: The source of all ranges.
        starts: First byte of each range, in ascending order.
        sizes: Bytes of each range, far fewer than 1 MiB; ranges do not overlap.
        gap_bytes: Ranges at most this far apart are read together; None for the gap of the source.

    Raises:
        TruncatedError: The source ends before a range does.
    """

    def read(some: Sequence[range]) -> list[bytes]:
        room = bytearray()
        return [piece for span in some for piece in _read_span(source, span, starts, sizes, room)]

    access = source.access
    spans = list(_spans(starts, sizes, access.gap_bytes if gap_bytes is None else gap_bytes))
    pieces: list[bytes] = []
    requests = checks_with_data(source)  # each takes longer than the start of a thread
    fewest, alone = (2, 0.0) if requests else (_READS_FOR_THREADS, _ALONE_SECONDS)
    alone_until = time.perf_counter() + alone
    done = 0
    room = bytearray()
    while done < len(spans) and (len(spans) - done < fewest or time.perf_counter() < alone_until):
        pieces += _read_span(source, spans[done], starts, sizes, room)
        done += 1
    left = spans[done:]
    if not left:
        return pieces
    # Each thread waits for one cold page: more threads than cores pay.
    threads = spare_threads(min(access.parallel_requests, len(left)))
    if not threads:
        return pieces + read(left)
    share = -(-len(left) // threads)
    shares = [left[first : first + share] for first in range(0, len(left), share)]
    with Workers(len(shares), "sluice-headers") as workers:
        jobs = [workers.start(partial(read, some)) for some in shares]
        return pieces + list(chain.from_iterable(job.result() for job in jobs))


def _spans(starts: Sequence[int], sizes: Sequence[int], gap_bytes: int) -> Iterator[range]:
    """Yield the positions of the ranges in groups, each of which is one read."""
    first, end = 0, 0
    for position, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if position > first and (start - end > gap_bytes or start + size - starts[first] > _SPAN_BYTES):
            yield range(first, position)
            first = position
        end = start + size
    if starts:
        yield range(first, len(starts))


def _read_span(
    source: Source, span: range, starts: Sequence[int], sizes: Sequence[int], room: bytearray
) -> list[bytes]:
    """Return the ranges of one read.

    Args:
        source: The source of all ranges.
        span: Positions of these ranges.
        starts: First byte of each range.
        sizes: Bytes of each range.
        room: Memory for large reads, used again: zeroing new memory takes longer than the copy out of the page cache.
    """
    origin = starts[span[0]]
    nbytes = starts[span[-1]] + sizes[span[-1]] - origin
    if nbytes > _SMALL_BYTES and not checks_with_data(source):
        if len(room) < nbytes:
            room.extend(bytes(nbytes - len(room)))
        if source.read_into(origin, memoryview(room)[:nbytes]) == nbytes:
            return [bytes(room[(at := starts[each] - origin) : at + sizes[each]]) for each in span]
    data = source.read_at(origin, nbytes)
    return [data[(at := starts[each] - origin) : at + sizes[each]] for each in span]
