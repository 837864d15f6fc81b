"""A remote file whose bytes pass through a part in a cache directory, which becomes an ordinary local file.

Headers are requested from the server. The first read of data starts a download of the whole file: threads write pieces
of 8 MiB to the part, and readers wait for the pieces that they need, so that a load takes as long as its download. A
process that finds another one downloading reads that one's part, and continues if it dies.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from sluice import _defaults as defaults
from sluice._errors import SluiceError
from sluice._threads import Worker, join_threads, spare_threads, start_threads
from sluice.records import RequestRecord, Traffic
from sluice.sources.forwarding import ForwardingSource
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source
from sluice.sources.remote.cache_directory import (
    CacheDirectory,
    CachedObjectName,
    Sums,
    append,
    is_damaged,
    lock_part,
    open_file,
    pieces_of,
)
from sluice.sources.remote.file import RemoteFile

__all__ = ["CachedFile", "CompleteFile", "Download"]

#: Bytes of memory of each thread of a download.
_BUFFER_BYTES = 256 << 10

#: Seconds between two looks at a download: in this process, and elsewhere.
_PAUSE_SECONDS, _LONG_PAUSE_SECONDS = 0.003, 0.05

#: Seconds without a written byte after which another process that downloads counts as stopped.
_PATIENCE_SECONDS = 10.0


class CompleteFile(LocalFile):
    """A remote file of which all bytes are cached: a local file with the address of the remote one; see ``Source``."""

    note = "read from the cache"

    def __init__(self, name: CachedObjectName, mark: int, path: str) -> None:
        """Own the mark of use.

        Raises:
            SluiceError: The file cannot be examined.
        """
        self._address = name.address
        self._unmark = weakref.finalize(self, _close, mark)
        super().__init__(path)

    @property
    def path(self) -> str:
        return self._address

    def close(self) -> None:
        super().close()
        self._unmark()


class Download:
    """The part of one entry while this process reads it, and writes it if no other process does."""

    def __init__(self, cache: CacheDirectory, name: CachedObjectName, source: RemoteFile) -> None:
        """Open the part and start threads that fill it.

        Raises:
            OSError: The directory cannot be used, or has no room.
        """
        self._cache, self._name, self._source = cache, name, source
        #: Bytes from the start of the file that are present and right.
        self.have = 0
        #: Why nothing more is cached, as a clause; None if nothing failed.
        self.problem: str | None = None
        #: Error of the server, for every reader.
        self.error: BaseException | None = None
        self._lock, self._threads, self._stopped = threading.Lock(), list[Worker](), False
        self._next, self._crcs, self._compared = 0, dict[int, int](), False
        self._part = self._mark = -1
        with cache.locked() as directory:
            self._mark = cache.use(directory, name)
            try:
                self._part = open_file(directory, name.file)
                self.have = name.nbytes  # another process has completed it
            except FileNotFoundError:
                cache.make_room(directory, name)
                self._part = open_file(directory, f"{name.file}.part", make=True)
                leads = self._take()
        if not self.have and leads:
            self._start()

    def _take(self) -> bool:
        """Lock the part for writing, unless another process writes it. The directory is locked."""
        if not lock_part(self._part):
            return False
        if Sums.read(self._mark).pieces:
            append(self._mark, "?")
        return True

    def _start(self) -> None:
        count = spare_threads(min(self._source.access.parallel_requests, pieces_of(self._name.nbytes)))
        start_threads(self._threads, count, self._work, "sluice-download")
        if not self._threads:
            self.problem = "the process cannot start threads"

    def _work(self) -> None:
        try:
            with self._lock:
                if not self._compared:
                    self._compare()
            while (number := self._claim()) is not None and (crc := self._fetch(number)) is not None:
                self._arrived(number, crc)
        except SluiceError as error:
            self.error = error
        except OSError as error:
            self.failed(error)
        except BaseException as error:  # noqa: BLE001  (raised again in the threads that wait)
            self.error = error

    def _compare(self) -> None:
        """Compare what an earlier process has left with its sums, and drop the rest from the first damage on."""
        self._compared = True
        older = Sums.read(self._mark).pieces
        for number, crc in enumerate(older):
            if self._stopped:
                return
            if is_damaged(self._part, number, crc, self._name.nbytes):
                first = os.pread(self._mark, os.fstat(self._mark).st_size, 0).partition(b"\n")[0]
                lines = [first.decode(), *(f"{crc:08x}" for crc in older[:number])]
                os.ftruncate(self._mark, 0)
                append(self._mark, "\n".join(lines))
                older = older[:number]
                break
            self.have = min((number + 1) * defaults.CACHE_PIECE_BYTES, self._name.nbytes)
        self._next = len(older)
        if older:
            append(self._mark, "!")
        if self.have == self._name.nbytes:
            self._cache.publish(self._name, self._part, self._mark)

    def _claim(self) -> int | None:
        with self._lock:
            if self._stopped or self.problem or self.error or self._next == pieces_of(self._name.nbytes):
                return None
            self._next += 1
            return self._next - 1

    def _fetch(self, number: int) -> int | None:
        """Request a piece and write it to the part; return its CRC-32, None if the download was stopped."""
        at, crc = number * defaults.CACHE_PIECE_BYTES, 0
        end = min(at + defaults.CACHE_PIECE_BYTES, self._name.nbytes)
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, end - at)))
        with self._source.request(at, end - at) as opened:
            while at < end:
                if self._stopped:
                    return None
                some = buffer[: end - at]
                opened.read_into(at, some)
                crc = zlib.crc32(some, crc)
                while some:
                    written = os.pwrite(self._part, some, at)
                    at, some = at + written, some[written:]
        if number % 8 == 7:  # bytes on their way to the disk count as memory of a container
            os.fdatasync(self._part)
        return crc

    def _arrived(self, number: int, crc: int) -> None:
        with self._lock:
            self._crcs[number] = crc
            while (known := self._crcs.pop(self.have // defaults.CACHE_PIECE_BYTES, None)) is not None:
                append(self._mark, f"{known:08x}")
                self.have = min(self.have + defaults.CACHE_PIECE_BYTES, self._name.nbytes)
                if self.have == self._name.nbytes:
                    self._cache.publish(self._name, self._part, self._mark)
                    return

    def wait(self, offset: int, end: int) -> bool:
        """Wait until the bytes before ``end`` are present; return whether they are, False if the server is faster.

        Raises:
            SluiceError: The server failed.
        """
        while self.have < end:
            if not self._threads:
                self._follow()
            if self.error is not None:
                raise self.error
            if self.problem or self._stopped or offset > self.have + defaults.CACHE_WAIT_BYTES:
                return False
            if self._threads and not any(thread.unfinished for thread in self._threads):
                return self.have >= end
            time.sleep(_PAUSE_SECONDS if self._threads else _LONG_PAUSE_SECONDS)
        return True

    def _follow(self) -> None:
        """Look how far the process that downloads has come; take its place if it has died."""
        with self._lock:
            if self._threads:
                return
            try:
                sums = Sums.read(self._mark)
                if not sums.doubtful:
                    self.have = min(len(sums.pieces) * defaults.CACHE_PIECE_BYTES, self._name.nbytes)
                if self.have < self._name.nbytes:
                    with self._cache.locked():
                        leads = self._take()
                    if leads:
                        self.have = 0
                        self._start()
                    elif (
                        time.time() - max(os.fstat(each).st_mtime for each in (self._part, self._mark))
                        > _PATIENCE_SECONDS
                    ):
                        self.problem = "the process that fills it is stopped"
            except OSError as error:
                self.failed(error)

    def _changed(self) -> float:
        return max(os.fstat(each).st_mtime for each in (self._part, self._mark))

    def failed(self, error: OSError) -> None:
        """Record that the system refuses: nothing more is cached, and the load continues without."""
        self.problem = self.problem or error.strerror or str(error) or type(error).__name__

    def read(self, offset: int, buffer: memoryview) -> None:
        """Copy bytes that are present.

        Raises:
            OSError: The system refuses.
        """
        while buffer:
            found = os.preadv(self._part, [buffer], offset)
            if not found:
                raise OSError("the part was shortened")
            offset, buffer = offset + found, buffer[found:]

    def finish(self) -> None:
        """Wait for the last bytes, if only few are missing."""
        if self._threads and self._name.nbytes - self.have <= defaults.CACHE_REST_BYTES:
            with suppress(SluiceError):
                if self.wait(self.have, self._name.nbytes):
                    join_threads(self._threads)

    def stop(self) -> None:
        """Have the threads end soon."""
        self._stopped = True

    def close(self) -> None:
        """End the threads and stop using the entry."""
        self._stopped = True
        join_threads(self._threads)
        self.__del__()

    def __del__(self) -> None:
        part, mark, self._part, self._mark = self._part, self._mark, -1, -1
        _close(part)
        _close(mark)


class CachedFile(ForwardingSource):
    """A remote file that is not completely cached; see ``Source``."""

    _source: RemoteFile

    def __init__(self, source: RemoteFile, cache: CacheDirectory, name: CachedObjectName) -> None:
        """Own the file; the cache is not touched before data is read."""
        super().__init__(source)
        self.cache, self._name = cache, name
        self._expected = list[tuple[int, int, Callable[[bytes], None]]]()
        self._lock = threading.Lock()
        self._download: Download | None = None
        self._problem: str | None = None
        self._closed = False

    @property
    def note(self) -> str | None:
        """Why not all of the file was cached, as a clause; None if nothing failed."""
        problem = self._problem or (self._download.problem if self._download else None)
        return problem and f"not cached: {problem}"

    @property
    def traffic(self) -> Traffic:
        return self._source.traffic

    def observe(self, observer: Callable[[RequestRecord], object]) -> None:
        """Call a function after each request to the server."""
        self._source.observe(observer)

    @property
    def cached_bytes(self) -> int:
        """Bytes from the start of the file that are cached, as far as this object has looked."""
        return self._download.have if self._download else 0

    def read_at(self, offset: int, nbytes: int) -> bytes:
        download = self._download
        if download is not None and offset >= 0 and nbytes >= 0 and offset + nbytes <= download.have:
            with suppress(OSError):
                download.read(offset, memoryview(data := bytearray(nbytes)))
                return bytes(data)
        return self._source.read_at(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        total = max(0, min(len(buffer), self.identity.nbytes - offset))
        download = self._with(offset, total) if not direct and offset >= 0 and total else None
        if download is not None:
            try:
                download.read(offset, buffer[:total])
            except OSError as error:
                download.failed(error)
            else:
                return total
        return self._source.read_into(offset, buffer, direct=direct)

    @contextmanager
    def request(self, offset: int, nbytes: int) -> Iterator[Source]:
        if self._with(offset, nbytes) is not None:
            yield self
        else:
            with self._source.request(offset, nbytes) as opened:
                yield opened

    def expect(self, offset: int, nbytes: int, data_bytes: int, check: Callable[[bytes], None]) -> None:
        self._source.expect(offset, nbytes, data_bytes, check)  # for what is not read from the part
        self._expected.append((offset, nbytes, check))

    def check_unchanged(self) -> None:
        super().check_unchanged()
        left, self._expected = self._expected, []
        for offset, nbytes, check in left:
            if offset + nbytes <= self.cached_bytes:
                check(self.read_at(offset, nbytes))
        if self._download is not None:
            self._download.finish()

    def start(self, nbytes: int | None = None) -> Download | None:
        """Return the download of the file, for a read of some bytes; None if there is none."""
        if self._closed or self._problem:
            return None
        with self._lock:
            small = nbytes is not None and nbytes < defaults.CACHE_READ_BYTES
            if self._download is None and not (small and self.identity.nbytes > defaults.CACHE_REST_BYTES):
                try:
                    self._download = Download(self.cache, self._name, self._source)
                except OSError as error:
                    self._problem = error.strerror or str(error)
                else:
                    weakref.finalize(self, self._download.stop).atexit = False
            return self._download

    def fill(self) -> Iterator[None]:
        """Wait until the whole file is cached, or nothing more is; yield after each piece.

        Raises:
            SluiceError: The server failed.
        """
        nbytes, download = self.identity.nbytes, self.start()
        while download is not None and download.have < nbytes:
            if not download.wait(download.have, min(download.have + defaults.CACHE_PIECE_BYTES, nbytes)):
                return
            yield
        if download is not None:
            download.finish()

    def close(self) -> None:
        self._closed = True
        download = self._download
        if download is not None:
            self._problem, self._download = download.problem, None
            download.close()
        super().close()

    def _with(self, offset: int, nbytes: int) -> Download | None:
        """Return the download that has a range, after waiting for it; None if the server is asked instead."""
        download, end = self.start(nbytes), min(offset + nbytes, self.identity.nbytes)
        return download if download is not None and download.wait(offset, end) else None


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        with suppress(OSError):
            os.close(descriptor)
