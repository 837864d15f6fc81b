"""A remote file that is downloaded as a whole into a cache directory, and is an ordinary local file from then on.

Until ``fill`` is called, and if the cache fails, everything is requested from the server.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace

from sluice._errors import SluiceError
from sluice._threads import Workers, stopping
from sluice.records import FileIdentity, Traffic
from sluice.sources.forwarding import ForwardingSource
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source
from sluice.sources.remote.cache_directory import CacheDirectory, CacheEntry, CacheFile
from sluice.sources.remote.file import RemoteFile

__all__ = ["CachedFile", "CompleteFile"]

#: Bytes of memory of each thread of a download.
_BUFFER_BYTES = 256 << 10


class CompleteFile(LocalFile):
    """A remote file of which all bytes are cached: a local file with the address of the remote one; see ``Source``."""

    def __init__(self, cached: CacheFile, address: str) -> None:
        """Use a complete file, and the address of the remote one without credentials; raises as ``LocalFile`` does."""
        self._cached: CacheFile | None = cached
        self._version = cached.entry.version
        note, record_bytes = "read from the cache", cached.entry.record_bytes
        super().__init__(cached.path, shown=address, note=note, trailer_bytes=record_bytes)

    def _identified(self, status: os.stat_result) -> FileIdentity:
        # The time of the last change is that of the last use by any process.
        return replace(super()._identified(status), ctime_ns=0, version=self._version)

    def close(self) -> None:
        super().close()
        self._cached = None


class CachedFile(ForwardingSource):
    """A remote file that was not completely cached when it was opened; see ``Source``."""

    _source: RemoteFile

    def __init__(self, source: RemoteFile, cache: CacheDirectory, entry: CacheEntry) -> None:
        """Own the file; the cache is not touched before ``fill``."""
        super().__init__(source)
        self._cache, self._entry = cache, entry
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
        with self._lock:
            if self._local is not None or self._problem is not None:
                return
            try:
                with self._cache.writing(self._entry, report) as part:
                    if part is not None:
                        self._download(part, report)
                found = self._cache.complete(self._entry)
                if found is None:
                    raise FileNotFoundError(0, "the file was removed meanwhile")
                self._local = CompleteFile(found, self.path)
                self.cached_bytes = self._entry.nbytes
                report()
            except SluiceError:  # some of them are errors of the system as well
                raise
            except OSError as error:
                self._problem = error.strerror or str(error) or type(error).__name__

    def _download(self, part: CacheFile, report: Callable[[], object]) -> None:
        """Request the pieces that a part does not have, and publish it."""
        here = part.right()
        self.cached_bytes = sum(end - start for start, end in map(self._entry.piece, here))
        report()
        missing = [number for number in self._entry.pieces if number not in here]
        threads = min(self._source.access.parallel_requests, len(missing))
        with Workers(threads, "sluice-download") as workers:
            tasks = [workers.start(partial(self._fetch, part, number)) for number in missing]
            for task in tasks:
                self.cached_bytes += task.result()
                report()
        self._cache.publish(part)

    def _fetch(self, part: CacheFile, number: int) -> int:
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
                    written = os.pwrite(part.file.fileno(), some, at)
                    at, some = at + written, some[written:]
        if number % 8 == 7:  # bytes on their way to the disk count as memory of a container
            os.fdatasync(part.file.fileno())
        if at == end:
            part.arrived(number, crc)
        return end - start

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
        super().close()
