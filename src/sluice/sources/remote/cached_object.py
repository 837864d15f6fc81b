"""A remote object whose bytes are kept in an entry of a cache, and read from there if they are present.

It is a ``RemoteObject`` below ``RemoteFile``, so retries and resumed bodies are those of every server. Requests are
extended to whole blocks. Bytes are written to the cache as they arrive, from the memory of the caller; only the parts
of the first and the last block that the caller did not request take memory of their own.
"""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Self

from sluice import _defaults as defaults
from sluice.sources.remote.cache_directory import CacheEntry, blocks_of
from sluice.sources.remote.cache_files import OpenFiles
from sluice.sources.remote.protocol import Body, ObjectFacts, RemoteObject, RequestFailedError

__all__ = ["CachedObject"]

#: Blocks whose records are read at once.
_LOOKED_AT = 4096


class CachedObject:
    """An object in front of which there is a cache entry; see ``RemoteObject``."""

    def __init__(self, remote: RemoteObject, entry: CacheEntry) -> None:
        """Own the object and the entry.

        Args:
            remote: The object on its server.
            entry: The entry of the opened version.
        """
        self.remote, self.entry = remote, entry
        #: CRC-32 of the beginning of a block whose rest was lost with the connection, by the offset of the rest.
        self.begun: dict[int, int] = {}
        #: Bytes of each request to the server after the opening one.
        self.requested: list[int] = []

    @property
    def path(self) -> str:
        return self.remote.path

    @property
    def note(self) -> str | None:
        """Why not all of the object was cached, as a clause; None if nothing failed."""
        return None if self.entry.problem is None else f"not completely cached: {self.entry.problem}"

    def open_first(self, nbytes: int) -> tuple[ObjectFacts, AbstractContextManager[Body]]:
        return self.remote.open_first(nbytes)

    def open_range(self, offset: int, nbytes: int, facts: ObjectFacts) -> AbstractContextManager[Body]:
        if self.entry.open_for_use:  # also if it has no room: what is present is read
            try:
                return _Range(self, self.entry.open(), offset, nbytes, facts)
            except OSError as error:
                self.entry.failed(error)
        return self.request(offset, nbytes, facts)

    def request(self, offset: int, nbytes: int, facts: ObjectFacts) -> AbstractContextManager[Body]:
        """Request a range from the server."""
        self.requested.append(nbytes)
        return self.remote.open_range(offset, nbytes, facts)

    def missing(self, request_bytes: int) -> list[range]:
        """Return the ranges that are not cached, divided into requests of at most that many bytes.

        Raises:
            OSError: The entry cannot be read.
        """
        most = max(1, request_bytes // defaults.CACHE_BLOCK_BYTES)
        count = blocks_of(self.entry.name.nbytes)
        runs: list[tuple[int, int]] = []
        with self.entry.open() as files:
            for first in range(0, count, _LOOKED_AT):
                for index, crc in enumerate(files.present(first, min(_LOOKED_AT, count - first)), first):
                    if crc is not None:
                        continue
                    if runs and runs[-1][1] == index and index - runs[-1][0] < most:
                        runs[-1] = runs[-1][0], index + 1
                    else:
                        runs.append((index, index + 1))
        size = defaults.CACHE_BLOCK_BYTES
        return [range(start * size, min(end * size, self.entry.name.nbytes)) for start, end in runs]

    def keep_first(self, data: bytes) -> None:
        """Cache the bytes that came with the opening request."""
        try:
            with self.entry.open() as files:
                missing = files.present(0, blocks_of(len(data))).count(None)
                if missing:
                    self.entry.reserve(missing)
                    _BlockWriter(files, 0, 0, self.entry.name.nbytes).write(memoryview(data))
        except OSError as error:
            self.entry.failed(error)

    def close(self) -> None:
        self.entry.close()
        self.remote.close()


class _BlockWriter:
    """Writes consecutive bytes, and counts each block when it is whole."""

    def __init__(self, files: OpenFiles, at: int, crc: int, nbytes: int) -> None:
        self._files, self.at, self.crc, self._nbytes = files, at, crc, nbytes

    def write(self, data: memoryview) -> None:
        self._files.write(self.at, data)
        while data:
            room = defaults.CACHE_BLOCK_BYTES - self.at % defaults.CACHE_BLOCK_BYTES
            piece = data[:room]
            self.crc = zlib.crc32(piece, self.crc)
            self.at += len(piece)
            if len(piece) == room or self.at == self._nbytes:
                self._files.mark((self.at - 1) // defaults.CACHE_BLOCK_BYTES, self.crc)
                self.crc = 0
            data = data[len(piece) :]


class _Range:
    """A range of the object, from the cache and from requests for what is missing; see ``Body``."""

    def __init__(self, cached: CachedObject, files: OpenFiles, offset: int, nbytes: int, facts: ObjectFacts) -> None:
        """Own the open files.

        Raises:
            OSError: They cannot be read.
        """
        self._cached, self._files, self._facts = cached, files, facts
        self._at, self._end = offset, offset + nbytes
        self._first = offset // defaults.CACHE_BLOCK_BYTES
        self._request = ExitStack()
        self._body: Body | None = None
        self._body_end = 0
        self._writer: _BlockWriter | None = None
        self._scratch: memoryview | None = None
        try:
            count = -(-self._end // defaults.CACHE_BLOCK_BYTES) - self._first
            self._present = files.present(self._first, count)
        except BaseException:
            files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._at == self._end:
                self._read_rest()
            writer = self._writer
            if writer is not None and writer.at % defaults.CACHE_BLOCK_BYTES and writer.at == self._at:
                self._cached.begun[writer.at] = writer.crc
        finally:
            self._files.close()
            self._request.close()

    def readinto(self, buffer: memoryview) -> int:
        buffer = buffer[: self._end - self._at]
        if not buffer:
            return 0
        if self._body is None:
            found = self._from_cache(buffer)
            if found:
                self._at += found
                return found
            self._open_request()
        assert self._body is not None
        found = self._body.readinto(buffer[: self._body_end - self._at])
        self._keep(buffer[:found])
        self._at += found
        if self._at == self._body_end:
            self._close_request()
        return found

    def _from_cache(self, buffer: memoryview) -> int:
        """Copy bytes of the block at the current position; return their number, 0 if it is missing or damaged."""
        index = self._at // defaults.CACHE_BLOCK_BYTES
        crc = self._present[index - self._first]
        if crc is None:
            return 0
        nbytes = self._files.block_bytes(index)
        before = self._at - index * defaults.CACHE_BLOCK_BYTES
        try:
            if not before and len(buffer) >= nbytes:
                if self._files.read(index, buffer[:nbytes], crc):
                    return nbytes
            elif self._files.read(index, block := self._room()[:nbytes], crc):
                found = block[before : before + len(buffer)]
                buffer[: len(found)] = found
                return len(found)
            self._files.unmark(index)
        except OSError as error:
            self._cached.entry.failed(error)
        self._present[index - self._first] = None
        return 0

    def _open_request(self) -> None:
        """Request all that is missing from the current position on, up to a part of the cache that is worth a pause."""
        index = self._at // defaults.CACHE_BLOCK_BYTES
        after, missing = self._missing_until(index)
        start, end, crc = index * defaults.CACHE_BLOCK_BYTES, after * defaults.CACHE_BLOCK_BYTES, 0
        if (known := self._cached.begun.pop(self._at, None)) is not None:
            start, crc = self._at, known
        keeps = self._cached.entry.usable
        if keeps:
            try:
                self._cached.entry.reserve(missing)
            except OSError as error:
                self._cached.entry.failed(error)
                keeps = False
        if not keeps:
            start, end = self._at, min(end, self._end)
        self._body_end = min(end, self._facts.nbytes)
        opened = self._cached.request(start, self._body_end - start, self._facts)
        self._body = self._request.enter_context(opened)
        self._writer = _BlockWriter(self._files, start, crc, self._facts.nbytes) if keeps else None
        if not self._receive(self._at - start):
            raise RequestFailedError("the answer ended too early", temporary=True)

    def _missing_until(self, index: int) -> tuple[int, int]:
        """Return the end of the blocks to request from ``index`` on, and the number of those that are missing."""
        present = 0
        position = index - self._first
        gap = defaults.CACHE_GAP_BYTES // defaults.CACHE_BLOCK_BYTES
        while position < len(self._present) and present < max(1, gap):
            present = present + 1 if self._present[position] is not None else 0
            position += 1
        end = self._first + position - present
        missing = sum(crc is None for crc in self._present[index - self._first : end - self._first])
        return end, missing

    def _receive(self, nbytes: int) -> bool:
        """Receive bytes that the caller did not request; return whether all of them came."""
        assert self._body is not None
        while nbytes:
            piece = self._room()[:nbytes]
            found = self._body.readinto(piece)
            if not found:
                return False
            self._keep(piece[:found])
            nbytes -= found
        return True

    def _read_rest(self) -> None:
        """Receive the rest of the last block; without it, the block is not cached."""
        if self._body is not None and self._writer is not None:
            with suppress(RequestFailedError):
                self._receive(self._body_end - self._at)
            self._close_request()

    def _close_request(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                start = self._first * defaults.CACHE_BLOCK_BYTES
                self._files.start_writing(start, self._writer.at - start)
        self._body = self._writer = None
        self._request.close()

    def _keep(self, data: memoryview) -> None:
        if self._writer is not None:
            try:
                self._writer.write(data)
            except OSError as error:
                self._cached.entry.failed(error)
                self._writer = None

    def _room(self) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(defaults.CACHE_BLOCK_BYTES))
        return self._scratch
