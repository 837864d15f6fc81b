"""A remote file that is downloaded as a whole into a cache directory, and is an ordinary local file from then on.

Until ``fill`` is called, and if the cache fails, everything is requested from the server.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from sluice._errors import SluiceError
from sluice._threads import Workers, spare_threads, stopping
from sluice.records import RequestRecord, Traffic
from sluice.sources.forwarding import ForwardingSource
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source
from sluice.sources.remote.cache_directory import CacheDirectory, CacheEntry, OpenCacheEntry
from sluice.sources.remote.file import RemoteFile

__all__ = ["CachedFile", "CompleteFile"]

#: Bytes of memory of each thread of a download.
_BUFFER_BYTES = 256 << 10


class CompleteFile(LocalFile):
    """A remote file of which all bytes are cached: a local file with the address of the remote one; see ``Source``."""

    note = "read from the cache"

    def __init__(self, entry: CacheEntry, mark: int, path: str, traffic: Traffic) -> None:
        """Own the descriptor that marks the entry as used.

        Args:
            entry: The entry.
            mark: The descriptor.
            path: The file.
            traffic: Requests that were made for it.

        Raises:
            SluiceError: The file cannot be examined.
        """
        self._address, self.traffic = entry.address, traffic
        self._unmark = weakref.finalize(self, os.close, mark)
        super().__init__(path)

    @property
    def path(self) -> str:
        return self._address

    def close(self) -> None:
        super().close()
        self._unmark()


class CachedFile(ForwardingSource):
    """A remote file that was not completely cached when it was opened; see ``Source``."""

    _source: RemoteFile

    def __init__(self, source: RemoteFile, cache: CacheDirectory, entry: CacheEntry) -> None:
        """Own the file; the cache is not touched before ``fill``."""
        super().__init__(source)
        self.cache, self._entry = cache, entry
        self._expected = list[tuple[int, int, Callable[[bytes], None]]]()
        self._lock = threading.Lock()
        self._local: CompleteFile | None = None
        self._problem: str | None = None
        #: Bytes that are cached, as far as this object has looked.
        self.cached_bytes = 0

    @property
    def note(self) -> str | None:
        """Why the file was not cached, as a clause; None if nothing failed."""
        return self._problem and f"not cached: {self._problem}"

    @property
    def traffic(self) -> Traffic:
        return self._source.traffic

    def observe(self, observer: Callable[[RequestRecord], object]) -> None:
        """Call a function after each request to the server."""
        self._source.observe(observer)

    @property
    def _reads(self) -> Source:
        return self._local or self._source

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self._reads.read_at(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        return (self._source if direct else self._reads).read_into(offset, buffer, direct=direct)

    @contextmanager
    def request(self, offset: int, nbytes: int) -> Iterator[Source]:
        if self._local is not None:
            yield self
        else:
            with self._source.request(offset, nbytes) as opened:
                yield opened

    def expect(self, offset: int, nbytes: int, data_bytes: int, check: Callable[[bytes], None]) -> None:
        self._source.expect(offset, nbytes, data_bytes, check)  # for what is read from the server
        self._expected.append((offset, nbytes, check))

    def check_unchanged(self) -> None:
        self._reads.check_unchanged()
        if self._local is not None:
            left, self._expected = self._expected, []
            for offset, nbytes, check in left:
                check(self._local.read_at(offset, nbytes))

    def forget(self, offset: int, nbytes: int) -> None:
        self._reads.forget(offset, nbytes)

    def fill(self, report: Callable[[], object] = lambda: None) -> None:
        """Download what is missing, unless that has failed before; ``note`` has the problem if the system refuses.

        Args:
            report: Called whenever ``cached_bytes`` has changed.

        Raises:
            SluiceError: The server failed.
        """

        def reached(nbytes: int) -> None:
            self.cached_bytes = nbytes
            report()

        with self._lock:
            if self._local is not None or self._problem is not None:
                return
            try:
                with self.cache.writing(self._entry, reached) as part:
                    if part is not None:
                        self._download(part, reached)
                found = self.cache.complete(self._entry)
                if found is None:
                    raise FileNotFoundError(0, "the file was removed meanwhile")
                self._local = CompleteFile(self._entry, *found, self.traffic)
                reached(self._entry.nbytes)
            except SluiceError:  # some of them are errors of the system as well
                raise
            except OSError as error:
                self._problem = error.strerror or str(error) or type(error).__name__

    def _download(self, part: OpenCacheEntry, reached: Callable[[int], None]) -> None:
        """Request the pieces that a part does not have, and publish it."""
        here = set(part.right())
        nbytes = sum(end - start for start, end in map(self._entry.piece, here))
        reached(nbytes)
        missing = [number for number in self._entry.pieces if number not in here]
        threads = spare_threads(min(self._source.access.parallel_requests, len(missing)))
        with Workers(threads, "sluice-download") as workers:
            tasks = [workers.start(partial(self._fetch, part, number)) for number in missing]
            for task in tasks:
                nbytes += task.result()
                reached(nbytes)
        self.cache.publish(part)

    def _fetch(self, part: OpenCacheEntry, number: int) -> int:
        """Request a piece, write it and return its size."""
        start, end = self._entry.piece(number)
        at, crc = start, 0
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, end - at)))
        with self._source.request(at, end - at) as opened:
            while at < end and not stopping():
                some = buffer[: end - at]
                opened.read_into(at, some)
                crc = zlib.crc32(some, crc)
                while some:
                    written = os.pwrite(part.data, some, at)
                    at, some = at + written, some[written:]
        if number % 8 == 7:  # bytes on their way to the disk count as memory of a container
            os.fdatasync(part.data)
        if at == end:
            part.arrived(number, crc)
        return end - start

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
        super().close()
