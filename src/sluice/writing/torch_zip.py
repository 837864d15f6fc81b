"""``torch.save`` zip files: ``data.pkl`` with the object, and one stored record per storage.

The records are those of torch 2: ``data.pkl``, ``.format_version``, ``.storage_alignment``, ``byteorder``, ``data/0``,
``data/1``, ... and ``version``. Everything but the CRCs is known before the first byte is written, so that bytes can be
written in any order. CRC-32 is the remainder of the data, as a polynomial over GF(2), and so linear: the CRC of the
whole is the sum (exclusive or) of the CRCs of its pieces, each multiplied by x to the power of the number of bits that
follow the piece, as in zlib's ``crc32_combine``.

A file that is written front to back has the CRC after the data of each record, in a data descriptor, as torch does. The
data of each record is aligned to 64 bytes, by padding in the extra field of its header.
"""

from __future__ import annotations

import struct
import sys
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

from msgspec import Struct

from sluice.writing.safetensors import TensorOutline

__all__ = ["HashedTensor", "TorchFile", "TorchZipWriter", "WriteAt", "moved"]

#: Writes bytes of a file at a position: each byte once, in any order, from any thread.
WriteAt: TypeAlias = Callable[[int, bytes | bytearray | memoryview], None]

#: Small records that torch writes next to the object and its data.
_SMALL_RECORDS = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": sys.byteorder.encode()}

_VERSION_RECORD = b"3\n"

#: Bytes per write of the central directory.
_PIECE_BYTES = 1 << 20

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

#: The polynomial of CRC-32, bit-reversed.
_POLYNOMIAL = 0xEDB88320

#: Kind of torch's padding, and bytes before the content of an extra field.
_PADDING_KIND, _EXTRA_HEADER_BYTES = b"FB", 4


class HashedTensor(Struct, frozen=True, kw_only=True):
    """A tensor of a torch file, for the manifest."""

    #: Its dtype and shape in the file.
    outline: TensorOutline
    #: Number of the storage that holds its elements, in row-major order, and nothing else; otherwise None.
    storage: int | None
    #: The tensor.
    source: Any


class TorchFile(Struct, frozen=True, kw_only=True):
    """Layout of a torch file and the sources of its storages."""

    #: Content of ``data.pkl``.
    pickled: bytes | bytearray
    #: Source of each storage, whose row-major elements it holds, and its dtype.
    storages: Sequence[tuple[Any, str]]
    #: Size of each storage, in bytes.
    sizes: Sequence[int]
    #: Number of places of its tensors; a container that occurs more than once counts once.
    tensors: int
    #: Number of cast tensors by pair of dtypes.
    casts: Mapping[str, int]
    #: Tensors of the manifest by name.
    hashed: Mapping[str, HashedTensor]


class TorchZipWriter:
    """Writer of a file whose layout is fixed, in columns to hold 100,000 records.

    Storages have the numbers that the pickle gives them.
    """

    def __init__(self, pickled: bytes | bytearray, sizes: Sequence[int], *, in_order: bool = False) -> None:
        """Lay out the file.

        Args:
            pickled: Content of ``data.pkl``.
            sizes: Size of each storage, in bytes.
            in_order: Whether the file is written from its first byte to its last. Storages are then written in order.
        """
        self._in_order = in_order
        self._flags = _UTF8 | (_DESCRIBED if in_order else 0)
        before = {"data.pkl": pickled, **_SMALL_RECORDS}
        self._names = list(before)
        self._first, self._last = len(before), len(before) + len(sizes)
        self._small = {**dict(enumerate(before.values())), self._last: _VERSION_RECORD}
        self._headers, self._sizes, self._crcs = array("Q"), array("Q"), array("I")
        self._lock = threading.Lock()
        self._begun = -1
        #: Size of the tensor data, in bytes.
        self.nbytes = sum(sizes)
        #: Size of the file without its central directory, in bytes.
        self.records_bytes = 0
        for nbytes in (*map(len, before.values()), *sizes, len(_VERSION_RECORD)):
            self._add(nbytes)

    def _add(self, nbytes: int) -> None:
        number = len(self._sizes)
        self._headers.append(self.records_bytes)
        self._sizes.append(nbytes)
        self._crcs.append(0)
        self.records_bytes = self._data(number) + nbytes + len(self._descriptor(number))

    @property
    def file_bytes(self) -> int:
        """Size of the whole file, in bytes."""
        return self.records_bytes + sum(map(len, self._directory()))

    def offset(self, storage: int) -> int:
        """Return the first byte of a storage in the file."""
        return self._data(self._first + storage)

    def write(self, write_at: WriteAt, storage: int, at: int, piece: bytes | memoryview) -> None:
        """Write a piece of a storage; each byte once, in any order unless the file is written in order. Thread-safe.

        Args:
            write_at: Writes to the file.
            storage: Number of the storage.
            at: First byte of the piece in the storage.
            piece: The bytes.
        """
        number = self._first + storage
        if self._in_order:
            self._begin_records(write_at, number)
        write_at(self._data(number) + at, piece)
        crc = moved(zlib.crc32(piece), self._sizes[number] - at - len(piece))
        with self._lock:
            self._crcs[number] ^= crc

    def finish(self, write_at: WriteAt) -> int:
        """Write everything but the storages, after all of them; return the size of the file in bytes."""
        self._begin_records(write_at, self._last)
        self._end_record(write_at)
        at = self.records_bytes
        for piece in _joined(self._directory()):
            write_at(at, piece)
            at += len(piece)
        return at

    def _begin_records(self, write_at: WriteAt, last: int) -> None:
        """Write what precedes the data of a record and was not written before: headers and small records."""
        while self._begun < last:
            self._end_record(write_at)
            self._begun += 1
            content = self._small.get(self._begun, b"")
            if content:
                self._crcs[self._begun] = zlib.crc32(content)
            write_at(self._headers[self._begun], self._header(self._begun))
            if content:
                write_at(self._data(self._begun), content)

    def _end_record(self, write_at: WriteAt) -> None:
        """Write what follows the data of the last record."""
        if self._begun >= 0 and (descriptor := self._descriptor(self._begun)):
            write_at(self._data(self._begun) + self._sizes[self._begun], descriptor)

    def _data(self, number: int) -> int:
        """Return the first byte of a record's data."""
        return self._headers[number] + len(self._header(number))

    def _header(self, number: int) -> bytes:
        """Return the local header of a record."""
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

    def _descriptor(self, number: int) -> bytes:
        """Return what follows the data of a record: nothing, or the CRC-32 and the size if it is written in order."""
        nbytes = self._sizes[number]
        form = "<4sIQQ" if nbytes >= _ESCAPE_32 else "<4sIII"
        return struct.pack(form, b"PK\7\x08", self._crcs[number], nbytes, nbytes) if self._in_order else b""

    def _directory(self) -> Iterator[bytes]:
        """Yield the central directory and the end records, piece by piece."""
        total = 0
        for number in range(len(self._sizes)):
            entry = self._entry(number)
            total += len(entry)
            yield entry
        count = len(self._sizes)
        after = self.records_bytes + total
        # torch always writes the zip64 records, so every reader of its files supports them.
        yield _END64.pack(
            b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, total, self.records_bytes
        )
        yield _LOCATOR.pack(b"PK\6\7", 0, after, 1)
        few, small, start = min(count, _ESCAPE_16), min(total, _ESCAPE_32), min(self.records_bytes, _ESCAPE_32)
        yield _END.pack(b"PK\5\6", 0, 0, few, few, small, start, 0)

    def _name(self, number: int) -> bytes:
        """Return the name of a record. torch names the directory after the file, and reads any name."""
        if number >= self._first:
            return f"archive/data/{number - self._first}".encode() if number < self._last else b"archive/version"
        return f"archive/{self._names[number]}".encode()

    def _entry(self, number: int) -> bytes:
        name, nbytes, header = self._name(number), self._sizes[number], self._headers[number]
        wide = [value for value in (nbytes, nbytes, header) if value >= _ESCAPE_32]
        extra = struct.pack(f"<HH{len(wide)}Q", _ZIP64_KIND, 8 * len(wide), *wide) if wide else b""
        size = min(nbytes, _ESCAPE_32)
        common = _VERSION, _VERSION, self._flags, 0, _TIME, _DATE, self._crcs[number], size, size
        start = min(header, _ESCAPE_32)
        return _ENTRY.pack(b"PK\1\2", *common, len(name), len(extra), 0, 0, 0, 0, start) + name + extra


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= _PIECE_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def moved(crc: int, nbytes: int) -> int:
    """Return the contribution of a piece's CRC to that of the whole, if ``nbytes`` bytes follow the piece."""
    return _product(_power(nbytes), crc) if nbytes else crc


@cache
def _squares() -> tuple[int, ...]:
    """Return x to the powers 1, 2, 4, ... modulo the polynomial."""
    powers = [1 << 30]
    while len(powers) < 64:
        powers.append(_product(powers[-1], powers[-1]))
    return tuple(powers)


def _power(nbytes: int) -> int:
    """Return x to the power of the bits in ``nbytes`` bytes, modulo the polynomial."""
    result, left, square = 1 << 31, nbytes * 8, 0
    while left:
        if left & 1:
            result = _product(_squares()[square], result)
        left >>= 1
        square += 1
    return result


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo ``_POLYNOMIAL``; the highest bit is the lowest power."""
    bit, product = 1 << 31, 0
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
