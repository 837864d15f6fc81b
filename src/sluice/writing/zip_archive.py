"""Zip archives of stored records whose sizes are known in advance, so that their bytes can be written in any order.

The data of each record is aligned to 64 bytes, by padding in the extra field of its header. The CRC-32 of a record is
the sum of the contributions of its pieces (``crc32``), so pieces can come in any order. An
archive that is written front to back has the CRC-32 after the data of each record, in a data descriptor, as torch does.
"""

from __future__ import annotations

import struct
import threading
import zlib
from array import array
from collections.abc import Iterator

from sluice.writing.crc32 import moved

__all__ = ["Archive"]

_ALIGNMENT_BYTES = 64

#: Values of 16-bit and 32-bit fields whose value is in a zip64 field.
_ESCAPE_16, _ESCAPE_32 = 0xFFFF, 0xFFFFFFFF

# signature, version needed, flags, method, time, date, CRC-32, stored bytes, bytes, name bytes, extra bytes
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
# signature, version made by, version needed, flags, method, time, date, CRC-32, stored bytes, bytes, name, extra and
# comment bytes, disk, internal and external attributes, header offset
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
# signature, bytes that follow, versions, disk, directory's disk, entries on the disk, entries, bytes, offset
_END64 = struct.Struct("<4sQHHIIQQQQ")
# signature, disk of the end record, its offset, disks
_LOCATOR = struct.Struct("<4sIQI")
# signature, disk, directory's disk, entries on the disk, entries, directory bytes, directory offset, comment bytes
_END = struct.Struct("<4sHHHHIIH")

#: Time of each record: the earliest of the format. A constant makes files with equal content equal.
_TIME, _DATE = 0, 33

#: Version 4.5 of the specification has zip64; names are UTF-8; a data descriptor follows the data.
_VERSION, _UTF8, _DESCRIBED = 45, 0x0800, 0x0008

_ZIP64_KIND = 1

#: Kind of torch's padding, and bytes before the content of an extra field.
_PADDING_KIND, _EXTRA_HEADER_BYTES = b"FB", 4


class Archive:
    """Positions and CRCs of the records of an archive, in columns to hold 100,000 records."""

    def __init__(self, directory: str, *, in_order: bool = False) -> None:
        """Create an archive without records.

        Args:
            directory: Directory of all record names.
            in_order: Whether headers are written before the CRC-32s are known, which follow the data.
        """
        self._directory = directory
        self._in_order = in_order
        self._flags = _UTF8 | (_DESCRIBED if in_order else 0)
        self._names: list[str] = []
        self._headers, self._sizes, self._crcs = array("Q"), array("Q"), array("I")
        self._lock = threading.Lock()
        #: End of the last record, where the central directory begins, in bytes.
        self.end = 0

    def add(self, name: str, nbytes: int) -> int:
        """Append a record and return its number."""
        self._names.append(name)
        self._headers.append(self.end)
        self._sizes.append(nbytes)
        self._crcs.append(0)
        number = len(self._names) - 1
        self.end = self.data(number) + nbytes + len(self.descriptor(number))
        return number

    def data(self, number: int) -> int:
        """Return the first byte of a record's data."""
        return self._headers[number] + len(self.header(number))

    def header(self, number: int) -> bytes:
        """Return the local header of a record; it is final after ``account`` has had all of the data."""
        name, nbytes = self._name(number), self._sizes[number]
        large = nbytes >= _ESCAPE_32
        extra = struct.pack("<HHQQ", _ZIP64_KIND, 16, nbytes, nbytes) if large else b""
        begin = self._headers[number] + _LOCAL.size + len(name) + len(extra) + _EXTRA_HEADER_BYTES
        padding = -begin % _ALIGNMENT_BYTES
        extra += _PADDING_KIND + padding.to_bytes(2, "little") + b"Z" * padding
        size, crc = (0, 0) if self._in_order else (nbytes, self._crcs[number])
        size = _ESCAPE_32 if large else size
        lengths = len(name), len(extra)
        return _LOCAL.pack(b"PK\3\4", _VERSION, self._flags, 0, _TIME, _DATE, crc, size, size, *lengths) + name + extra

    def descriptor(self, number: int) -> bytes:
        """Return what follows the data of a record: nothing, or the CRC-32 and the size if it is written in order."""
        nbytes = self._sizes[number]
        form = "<4sIQQ" if nbytes >= _ESCAPE_32 else "<4sIII"
        return struct.pack(form, b"PK\7\x08", self._crcs[number], nbytes, nbytes) if self._in_order else b""

    def header_offset(self, number: int) -> int:
        """Return the first byte of a record's local header."""
        return self._headers[number]

    def nbytes(self, number: int) -> int:
        """Return the size of a record's data, in bytes."""
        return self._sizes[number]

    def account(self, number: int, at: int, piece: bytes | bytearray | memoryview) -> None:
        """Add a piece of a record's data to its CRC; each byte once, in any order. Thread-safe.

        Args:
            number: Number of the record.
            at: First byte of the piece in the data.
            piece: The bytes.
        """
        crc = moved(zlib.crc32(piece), self._sizes[number] - at - len(piece))
        with self._lock:
            self._crcs[number] ^= crc

    def directory(self) -> Iterator[bytes]:
        """Yield the central directory and the end records, piece by piece; they are written at ``end``."""
        total = 0
        for number in range(len(self._names)):
            entry = self._entry(number)
            total += len(entry)
            yield entry
        count = len(self._names)
        after = self.end + total
        # torch always writes the zip64 records, so every reader of its files supports them.
        yield _END64.pack(b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, total, self.end)
        yield _LOCATOR.pack(b"PK\6\7", 0, after, 1)
        few, small, start = min(count, _ESCAPE_16), min(total, _ESCAPE_32), min(self.end, _ESCAPE_32)
        yield _END.pack(b"PK\5\6", 0, 0, few, few, small, start, 0)

    def _name(self, number: int) -> bytes:
        return f"{self._directory}/{self._names[number]}".encode()

    def _entry(self, number: int) -> bytes:
        name, nbytes, header = self._name(number), self._sizes[number], self._headers[number]
        wide = [value for value in (nbytes, nbytes, header) if value >= _ESCAPE_32]
        extra = struct.pack(f"<HH{len(wide)}Q", _ZIP64_KIND, 8 * len(wide), *wide) if wide else b""
        size = min(nbytes, _ESCAPE_32)
        return (
            _ENTRY.pack(
                b"PK\1\2",
                _VERSION,
                _VERSION,
                self._flags,
                0,
                _TIME,
                _DATE,
                self._crcs[number],
                size,
                size,
                len(name),
                len(extra),
                0,
                0,
                0,
                0,
                min(header, _ESCAPE_32),
            )
            + name
            + extra
        )
