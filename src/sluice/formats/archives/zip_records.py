"""Local headers of zip records: the offset, bytes and checksum of each record's data.

Layout: 30 bytes, the name, an extra field whose length only the local header declares, then the data. torch pads the
extra field so that the data starts at a multiple of 64 bytes, writes 0 for the CRC and sizes, and appends their values
after the data. Headers that are close to each other are read together.

Refused: a local header that contradicts the central directory, and data that overlaps the next record.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from sluice._errors import CheckpointError, FormatError, IntegrityError, LimitError
from sluice._options import Limits
from sluice.formats.archives.zip64 import zip64_fields
from sluice.formats.archives.zip_directory import (
    KNOWN_FLAGS,
    LOCAL_HEADER_BYTES,
    ZipRecord,
    read_directory,
)
from sluice.formats.coalesced import read_ranges
from sluice.formats.protocol import Checksum
from sluice.sources.protocol import Source

__all__ = ["locate_records", "read_record", "record_checksums"]

# signature, flags, method, stored bytes, bytes, name bytes, extra bytes
_LOCAL_HEADER = struct.Struct("<4s2xHH8xIIHH")

_IN_ZIP64 = 0xFFFFFFFF

#: Flag bit: the sizes follow the data, and the local header holds zeros. torch writes records this way.
_SIZES_FOLLOW = 0x0008


def locate_records(source: Source, records: Sequence[ZipRecord]) -> list[int]:
    """Return the offset in the file of the data of each record.

    Args:
        source: The archive.
        records: Records from the central directory, in any order.

    Raises:
        FormatError: A local header contradicts the central directory, or data overlaps the next record.
    """
    order = sorted(range(len(records)), key=lambda position: records[position].header)
    ordered = [records[position] for position in order]
    headers = read_ranges(source, [record.header for record in ordered], list(map(_header_bytes, ordered)))
    offsets = [_locate(source, record, header) for record, header in zip(ordered, headers, strict=True)]
    located = dict(zip(order, offsets, strict=True))
    return [located[position] for position in range(len(records))]


def read_record(source: Source, record: ZipRecord, max_bytes: int) -> tuple[int, bytes]:
    """Read a small record and check its CRC-32; return its offset in the file and its bytes.

    Raises:
        LimitError: The record has more than ``max_bytes`` bytes.
        FormatError: See ``locate_records``.
        IntegrityError: The CRC-32 does not match the central directory.
    """
    if record.nbytes > max_bytes:
        raise LimitError(
            f"record {record.name!r} has more than {max_bytes} bytes", file=source.path, found=record.nbytes
        )
    offset = _locate(source, record, source.read_at(record.header, _header_bytes(record)))
    data = source.read_at(offset, record.nbytes)
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


def record_checksums(source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
    """Return the CRC-32 of every record in file order, unused records included; the error for a damaged header."""
    records = list(read_directory(source, limits).records())
    try:
        offsets: list[int | CheckpointError] = list(locate_records(source, records))
    except CheckpointError:  # locate the records one by one, to find the damaged ones
        offsets = [_offset_or_error(source, record) for record in records]
    return [
        Checksum(name=record.name, offset=offset, nbytes=record.nbytes, crc=record.crc)
        if isinstance(offset, int)
        else offset
        for record, offset in zip(records, offsets, strict=True)
    ]


def _offset_or_error(source: Source, record: ZipRecord) -> int | CheckpointError:
    try:
        return locate_records(source, [record])[0]
    except CheckpointError as error:
        return error


def _header_bytes(record: ZipRecord) -> int:
    return LOCAL_HEADER_BYTES + len(record.name.encode())


def _locate(source: Source, record: ZipRecord, header: bytes) -> int:
    signature, flags, method, packed, nbytes, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(header)
    name = header[LOCAL_HEADER_BYTES : LOCAL_HEADER_BYTES + name_bytes]
    known = signature == b"PK\3\4" and not method and not flags & ~KNOWN_FLAGS
    if not known or name_bytes != len(name) or name != record.name.encode():
        raise FormatError(
            f"the local header of record {record.name!r} does not match the central directory",
            file=source.path,
            offset=record.header,
            found=f"signature {signature!r}, flags {flags:#x}, method {method}, name {name[:80]!r}",
        )
    extra = record.header + LOCAL_HEADER_BYTES + name_bytes
    if _IN_ZIP64 in (packed, nbytes):
        nbytes, packed = zip64_fields(source.read_at(extra, extra_bytes), (nbytes, packed)) or (-1, -1)
    follow = flags & _SIZES_FOLLOW and (nbytes, packed) == (0, 0)
    if not follow and (nbytes, packed) != (record.nbytes, record.nbytes):
        raise FormatError(
            f"the sizes in the local header of record {record.name!r} do not match the central directory",
            file=source.path,
            offset=record.header,
            expected=record.nbytes,
            found=nbytes,
        )
    offset: int = extra + extra_bytes
    if offset + record.nbytes > record.limit:
        raise FormatError(
            f"the data of record {record.name!r} overlaps the next record or the central directory",
            file=source.path,
            offset=offset,
            expected=f"at most {record.limit - offset} bytes",
            found=f"{record.nbytes} bytes",
        )
    return offset
