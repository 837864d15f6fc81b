"""Files of one cache entry: the data with holes, and a record of each block that is present.

Layout of the directory of an entry::

    NAME        bytes of the object at their offsets, under the name of the object; sparse
    blocks      header of 64 bytes, then 8 bytes for each block of 64 KiB: CRC-32 and a mark, or zeros
    about.json  address, version and size, for people

A block counts as present after its bytes were written, and is compared with its CRC-32 before any byte of it is used.
So neither a process that was killed nor a power failure can make wrong bytes count. When all blocks are present and on
the disk, the header gets the time of the last change of the data: from then on the data is an ordinary file.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import zlib
from array import array
from contextlib import suppress
from typing import Self

from msgspec import Struct

from sluice import _defaults as defaults

__all__ = ["EntryFiles", "Header", "OpenFiles", "boot_id", "file_name"]

#: Mark of this layout, bytes of the object, bytes that the entry is charged, time of the last change of complete data
#: in ns (else 0), and the boot in which all blocks were written.
_HEADER = struct.Struct("<8sQQQ16s16x")
_LAYOUT = b"sluice\x00\x01"

#: CRC-32 and mark of a block that is present.
_RECORD = struct.Struct("<II")
_PRESENT = 0x4C55_4C53

_UNKNOWN_BOOT = bytes(16)

_BLOCKS, _ABOUT = "blocks", "about.json"


def boot_id() -> bytes:
    """Return 16 bytes that differ after each start of this machine; zeros if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return _UNKNOWN_BOOT


def file_name(address: str) -> str:
    """Return the name of the data of an object: the last part of its address, as far as a file can have it."""
    last = address.rstrip("/").rpartition("/")[2]
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in last)[-100:]
    return f"_{name}" if name in {"", ".", "..", _BLOCKS, _ABOUT} or not name.isascii() else name


class Header(Struct, frozen=True, kw_only=True):
    """Header of an entry."""

    #: Bytes of the object.
    nbytes: int
    #: Bytes that the entry counts for in the bound of the cache.
    charge: int
    #: Time of the last change of the data when it was complete, in ns; 0 if it is not.
    complete_ns: int = 0
    #: The boot in which all blocks were written; zeros if several, or unknown. Data of an earlier boot may not have
    #: reached the disk.
    boot: bytes = _UNKNOWN_BOOT

    @property
    def written_now(self) -> bool:
        """Whether all blocks were written since this machine was started."""
        return self.boot != _UNKNOWN_BOOT and self.boot == boot_id()


class EntryFiles:
    """The files of one entry; nothing is open."""

    def __init__(self, directory: str, name: str) -> None:
        """Keep the paths."""
        self.directory = directory
        self.data = os.path.join(directory, name)
        self.blocks = os.path.join(directory, _BLOCKS)

    def make(self, header: Header, about: dict[str, object]) -> None:
        """Make the files of an entry without blocks.

        Raises:
            OSError: The system refuses.
        """
        os.mkdir(self.directory, 0o700)
        for path, nbytes in ((self.data, header.nbytes), (self.blocks, 0)):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.truncate(descriptor, nbytes)
            finally:
                os.close(descriptor)
        with open(os.path.join(self.directory, _ABOUT), "x", opener=_private, encoding="utf-8") as file:
            json.dump(about, file)
        self.write_header(header)  # last: without it the entry does not count

    def header(self) -> Header | None:
        """Return the header; None if the entry does not exist, or is not of this layout."""
        return read_header(self.directory)

    def write_header(self, header: Header) -> None:
        """Replace the header.

        Raises:
            OSError: The system refuses.
        """
        packed = _HEADER.pack(_LAYOUT, header.nbytes, header.charge, header.complete_ns, header.boot)
        descriptor = os.open(self.blocks, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write_all(descriptor, 0, memoryview(packed))
        finally:
            os.close(descriptor)

    def touch(self) -> None:
        """Record that the entry is used now.

        Raises:
            OSError: The system refuses.
        """
        now = time.time_ns()  # that of the file system advances every few milliseconds
        os.utime(self.blocks, ns=(now, now))


def read_header(directory: str) -> Header | None:
    """Return the header of the entry in a directory; None if there is none."""
    try:
        with open(os.path.join(directory, _BLOCKS), "rb", buffering=0) as file:
            found = file.read(_HEADER.size)
        layout, nbytes, charge, complete_ns, boot = _HEADER.unpack(found)
    except (OSError, struct.error):
        return None
    if layout != _LAYOUT:
        return None
    return Header(nbytes=nbytes, charge=charge, complete_ns=complete_ns, boot=boot)


def last_use_ns(directory: str) -> int:
    """Return when an entry was used last, in ns since 1970; 0 if it is damaged."""
    with suppress(OSError):
        return os.stat(os.path.join(directory, _BLOCKS)).st_mtime_ns
    return 0


class OpenFiles:
    """The open files of one entry, in a ``with`` block; every method raises ``OSError``. Threads have their own."""

    def __init__(self, files: EntryFiles, nbytes: int, one_writer: threading.Lock) -> None:
        """Open them.

        Args:
            files: The files.
            nbytes: Bytes of the object.
            one_writer: Held while data is written. The kernel lets one thread at a time write to a file, and others
                spin meanwhile: writing took four times as much processor time without this.
        """
        self._nbytes, self._one_writer = nbytes, one_writer
        self._data = os.open(files.data, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._blocks = os.open(files.blocks, os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            os.close(self._data)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; called once."""
        os.close(self._data)
        os.close(self._blocks)

    def present(self, first: int, count: int) -> list[int | None]:
        """Return the CRC-32 of each of ``count`` blocks; None for those that are missing."""
        found = os.pread(self._blocks, count * _RECORD.size, _HEADER.size + first * _RECORD.size)
        found = found[: len(found) - len(found) % _RECORD.size]
        known = [crc if mark == _PRESENT else None for crc, mark in _RECORD.iter_unpack(found)]
        return known + [None] * (count - len(known))

    def count(self) -> int:
        """Return the number of blocks that are present."""
        total, at = 0, _HEADER.size
        while found := os.pread(self._blocks, 1 << 20, at):
            marks = array("I", found[: len(found) - len(found) % _RECORD.size])[1::2]
            total += marks.count(_PRESENT)
            at += len(found)
        return total

    def read(self, index: int, buffer: memoryview, crc: int) -> bool:
        """Read a block into a buffer of its size; return whether it is as it was written."""
        at, done = index * defaults.CACHE_BLOCK_BYTES, 0
        while done < len(buffer):
            found = os.preadv(self._data, [buffer[done:]], at + done)
            if not found:
                return False
            done += found
        return zlib.crc32(buffer) == crc

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes of blocks that do not count yet."""
        with self._one_writer:
            _write_all(self._data, offset, data)

    def mark(self, index: int, crc: int) -> None:
        """Count a block whose bytes were written."""
        record = memoryview(_RECORD.pack(crc, _PRESENT))
        _write_all(self._blocks, _HEADER.size + index * _RECORD.size, record)

    def unmark(self, index: int) -> None:
        """Forget a block."""
        _write_all(self._blocks, _HEADER.size + index * _RECORD.size, memoryview(bytes(_RECORD.size)))

    def start_writing(self, offset: int, nbytes: int) -> None:
        """Let the system write a range to the disk now, so that changed pages do not accumulate."""
        os.posix_fadvise(self._data, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> int:
        """Wait until the data is on the disk; return the time of its last change in ns."""
        os.fdatasync(self._data)
        return os.fstat(self._data).st_mtime_ns

    def block_bytes(self, index: int) -> int:
        """Return the size of a block: the last one may be shorter."""
        return min(defaults.CACHE_BLOCK_BYTES, self._nbytes - index * defaults.CACHE_BLOCK_BYTES)

    def forget_damaged(self) -> None:
        """Forget all blocks that are not as they were written."""
        buffer = memoryview(bytearray(defaults.CACHE_BLOCK_BYTES))
        count = -(-self._nbytes // defaults.CACHE_BLOCK_BYTES)
        for first in range(0, count, 1024):
            for index, crc in enumerate(self.present(first, min(1024, count - first)), first):
                if crc is not None and not self.read(index, buffer[: self.block_bytes(index)], crc):
                    self.unmark(index)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write_all(descriptor: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
