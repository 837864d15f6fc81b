"""Local headers of zip records: the offset, bytes and checksum of each record's data.

Layout: 30 bytes, the name, an extra field whose length only the local header declares, then the data. torch pads the
extra field so that the data starts at a multiple of 64 bytes, writes 0 for the CRC and sizes, and appends their values
after the data. Headers that are close to each other are read together.

A wrong length of the extra field shifts the data, and all numbers with it. Therefore the data must end where its record
does: at the next header, or at torch's data descriptor with data at a multiple of 64 bytes. If it does not, because of
padding or a descriptor of a different form, which other writers leave, the CRC-32 decides.

Refused: a local header that contradicts the central directory, data that overlaps the next record, and data that
neither ends where its record does nor has the CRC-32 of the central directory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TypeVar

from msgspec import Struct

from sluice._errors import CheckpointError, FormatError, IntegrityError, LimitError
from sluice._options import Limits
from sluice.formats.protocol import Checksum
from sluice.sources.protocol import CheckingSource, Source
from sluice.sources.ranges import read_ranges

__all__ = [
    "DEFLATED",
    "IN_ZIP64",
    "KNOWN_FLAGS",
    "LOCAL_HEADER_BYTES",
    "ZipRecord",
    "archive_error",
    "expect_records",
    "locate_records",
    "read_record",
    "record_checksums",
    "zip64_fields",
]

_Result = TypeVar("_Result")

# signature, flags, method, stored bytes, bytes, name bytes, extra bytes
_LOCAL_HEADER = struct.Struct("<4s2xHH8xIIHH")

#: Size of a local header without its name and extra field, in bytes.
LOCAL_HEADER_BYTES = 30

#: Flag bits that do not affect stored data: sizes follow the data (bit 3), names are UTF-8 (bit 11).
KNOWN_FLAGS = 0x0808

#: Compression of the records of code.
DEFLATED = 8

#: Escape value: the actual value is in the zip64 part of an extra field.
IN_ZIP64 = 0xFFFFFFFF

_ZIP64_EXTRA = 1

#: Flag bit: the sizes follow the data, and the local header holds zeros. torch writes records this way.
_SIZES_FOLLOW = 0x0008

#: Sizes of the data descriptors of torch, with numbers of 32 and 64 bits, and the alignment of its data, in bytes.
_PACKED_DESCRIPTORS, _PACKED_ALIGNMENT = (16, 24), 64

#: Most bytes of an extra field without the padding: its own header, and the fields of zip64.
_EXTRA_BYTES = 32

#: Bytes of one read for a CRC-32.
_CHECKED_BYTES = 1 << 20


class ZipRecord(Struct, frozen=True, kw_only=True):
    """One record of a zip archive, as described by the central directory."""

    #: Full name, with the common directory.
    name: str
    #: Offset of the local header in the file, in bytes.
    header: int
    #: Size of the data, in bytes.
    nbytes: int
    #: Offset of the first byte after the record: the next local header or the central directory.
    limit: int
    #: CRC-32 of the data; 0 if the writer did not compute it.
    crc: int = 0
    #: Size of the data of a compressed record after unpacking, in bytes; None for stored data.
    unpacked: int | None = None


def locate_records(source: Source, records: Sequence[ZipRecord]) -> list[int]:
    """Return the offset in the file of the data of each record.

    Args:
        source: The archive.
        records: Records from the central directory, in any order.

    Raises:
        FormatError: A local header contradicts the central directory, or data overlaps the next record.
    """
    ordered = sorted(records, key=attrgetter("header"))
    pieces = read_ranges(source, [record.header for record in ordered], list(map(_header_bytes, ordered)))
    offsets = {one.header: _data_offset(source, one, piece) for one, piece in zip(ordered, pieces, strict=True)}
    return [offsets[record.header] for record in records]


def expect_records(source: CheckingSource, records: Sequence[ZipRecord]) -> list[int]:
    """Return the offset of the data of each record, which is checked when the data is read.

    torch packs records: the data of one ends a data descriptor before the next header, and begins at a multiple of 64.
    Where both hold, the local header is expected to end there. Other headers are read now.

    Raises:
        FormatError: See ``locate_records``; reads of the data raise it too.
    """
    offsets = [_packed_offset(record) for record in records]
    others = [position for position, offset in enumerate(offsets) if offset is None]
    located = dict(zip(others, locate_records(source, [records[position] for position in others]), strict=True))
    for record, offset in zip(records, offsets, strict=True):
        if offset is not None:
            check = partial(_check_offset, source, record, offset)
            source.expect(record.header, offset - record.header, record.nbytes, check)
    return [located[position] if offset is None else offset for position, offset in enumerate(offsets)]


def _packed_offset(record: ZipRecord) -> int | None:
    """Return where the data of a record begins if its archive was written by torch, judged by the central directory."""
    first = record.header + _header_bytes(record)
    for descriptor_bytes in _PACKED_DESCRIPTORS:
        offset = record.limit - descriptor_bytes - record.nbytes
        if offset % _PACKED_ALIGNMENT == 0 and 0 <= offset - first <= _PACKED_ALIGNMENT + _EXTRA_BYTES:
            return offset
    return None


def _check_offset(source: Source, record: ZipRecord, offset: int, header: bytes) -> None:
    """Raise unless a local header is right and ends at ``offset``."""
    found, _ = _locate(source, record, header)
    if found != offset:
        problem = f"the local header of record {record.name!r} does not end where the data begins"
        expected = f"data at byte {offset}, in front of the next header"
        raise archive_error(problem, source, record.header, expected, f"data at byte {found}")


def read_record(source: Source, record: ZipRecord, max_bytes: int) -> tuple[int, bytes]:
    """Read a small record and check its CRC-32; return its offset in the file and its bytes, unpacked.

    Raises:
        LimitError: The record has more than ``max_bytes`` bytes.
        FormatError: See ``locate_records``.
        IntegrityError: The CRC-32 does not match the central directory.
    """
    largest = max(record.nbytes, record.unpacked or 0)
    if largest > max_bytes:
        raise LimitError(f"record {record.name!r} has more than {max_bytes} bytes", file=source.path, found=largest)
    offset = _data_offset(source, record, source.read_at(record.header, _header_bytes(record)))
    data = source.read_at(offset, record.nbytes)
    if record.unpacked is not None:
        data = _unpack(data, record.unpacked)
    # torch writes a CRC of 0 if checksums are disabled.
    if record.crc and zlib.crc32(data) != record.crc:
        raise IntegrityError(
            f"the CRC-32 of record {record.name!r} does not match its data",
            file=source.path,
            offset=offset,
            expected=f"{record.crc:#010x}",
            found=f"{zlib.crc32(data):#010x}",
        )
    return offset, data


def _unpack(data: bytes, nbytes: int) -> bytes:
    """Return deflated data of a declared size; anything else if it is damaged, which its CRC-32 shows."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, max(1, nbytes))
    except zlib.error:
        return b""


def record_checksums(source: Source, every: Iterable[ZipRecord], limits: Limits) -> list[Checksum | CheckpointError]:
    """Return the CRC-32 of every record of an archive in file order; the error for a damaged header.

    Compressed records are checked at once.
    """
    every = list(every)
    records = [record for record in every if record.unpacked is None]
    packed = (record for record in every if record.unpacked is not None)
    damaged = [_or_error(read_record, source, record, limits.header_bytes) for record in packed]
    try:
        offsets: list[int | CheckpointError] = list(locate_records(source, records))
    except CheckpointError:  # locate the records one by one, to find the damaged ones
        offsets = [_or_error(lambda one: locate_records(source, [one])[0], record) for record in records]
    return [
        Checksum(name=record.name, offset=offset, nbytes=record.nbytes, crc=record.crc)
        if isinstance(offset, int)
        else offset
        for record, offset in zip(records, offsets, strict=True)
    ] + [error for error in damaged if isinstance(error, CheckpointError)]


def _or_error(read: Callable[..., _Result], *arguments: object) -> _Result | CheckpointError:
    try:
        return read(*arguments)
    except CheckpointError as error:
        return error


def _check_by_checksum(source: Source, record: ZipRecord, offset: int) -> None:
    """Raise unless the data has the CRC-32 that the central directory has for the record."""
    crc, at, end = 0, offset, offset + record.nbytes
    while at < end:
        piece = source.read_at(at, min(_CHECKED_BYTES, end - at))
        crc = zlib.crc32(piece, crc)
        at += len(piece)
    if crc != record.crc:
        problem = f"the data of record {record.name!r} is not at the offset that its local header declares"
        expected = f"data that ends in front of byte {record.limit}, or a CRC-32 of {record.crc:#010x}"
        raise archive_error(problem, source, offset, expected, f"{crc:#010x}")


def _header_bytes(record: ZipRecord) -> int:
    return LOCAL_HEADER_BYTES + len(record.name.encode())


def _data_offset(source: Source, record: ZipRecord, header: bytes) -> int:
    """Return the offset of the data of a record, which ends where the record does or has its CRC-32."""
    offset, described = _locate(source, record, header)
    left = record.limit - offset - record.nbytes  # up to the next header
    whole = left in _PACKED_DESCRIPTORS and offset % _PACKED_ALIGNMENT == 0 if described else left == 0
    if record.nbytes and record.unpacked is None and not whole:
        _check_by_checksum(source, record, offset)
    return offset


def _locate(source: Source, record: ZipRecord, header: bytes) -> tuple[int, bool]:
    """Return the offset of the data of a record by its local header, and whether a data descriptor follows it."""
    signature, flags, method, packed, nbytes, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(header)
    name = header[LOCAL_HEADER_BYTES : LOCAL_HEADER_BYTES + name_bytes]
    expected = DEFLATED if record.unpacked is not None else 0
    plain = signature == b"PK\3\4" and method == expected and not flags & ~KNOWN_FLAGS
    if not plain or name_bytes != len(name) or name != record.name.encode():
        problem = f"the local header of record {record.name!r} does not match the central directory"
        found = f"signature {signature!r}, flags {flags:#x}, method {method}, name {name[:80]!r}"
        raise archive_error(problem, source, record.header, None, found)
    extra = record.header + LOCAL_HEADER_BYTES + name_bytes
    if IN_ZIP64 in (packed, nbytes):
        known = header[extra - record.header :][:extra_bytes]
        field = known if len(known) == extra_bytes else source.read_at(extra, extra_bytes)
        nbytes, packed = zip64_fields(field, (nbytes, packed)) or (-1, -1)
    follow = flags & _SIZES_FOLLOW and (nbytes, packed) == (0, 0)
    unpacked = record.nbytes if record.unpacked is None else record.unpacked
    if not follow and (nbytes, packed) != (unpacked, record.nbytes):
        problem = f"the sizes in the local header of record {record.name!r} do not match the central directory"
        raise archive_error(problem, source, record.header, record.nbytes, nbytes)
    offset: int = extra + extra_bytes
    if offset + record.nbytes > record.limit:
        problem = f"the data of record {record.name!r} overlaps the next record or the central directory"
        most = f"at most {record.limit - offset} bytes"
        raise archive_error(problem, source, offset, most, f"{record.nbytes} bytes")
    return offset, bool(flags & _SIZES_FOLLOW)


def zip64_fields(extra: bytes, fields: tuple[int, ...]) -> tuple[int, ...] | None:
    """Replace the escaped values in ``fields`` by their 64-bit values from the zip64 part of an extra field.

    Args:
        extra: The whole extra field.
        fields: 32-bit values in the order of the zip64 part; 0xFFFFFFFF is the escape.

    Returns:
        The values, or None if the zip64 part is missing or too short.
    """
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == _ZIP64_EXTRA and at + nbytes <= len(extra):
            values = iter(struct.unpack_from(f"<{nbytes // 8}Q", extra, at))
            filled = (next(values, None) if field == IN_ZIP64 else field for field in fields)
            found = tuple(value for value in filled if value is not None)
            return found if len(found) == len(fields) else None
        at += nbytes
    return None


def archive_error(
    problem: str, source: Source, offset: int, expected: object, found: object, advice: str | None = None
) -> FormatError:
    """Return the error for a damaged archive."""
    return FormatError(problem, file=source.path, offset=offset, expected=expected, found=found, advice=advice)
