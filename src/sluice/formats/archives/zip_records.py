"""Where the data of zip records lies: local headers, read together where they are close.

A local header is 30 bytes, the name and an extra field of a length that only the header says; the data follows. torch
pads the extra field so that the data starts at a multiple of 64, leaves CRC and sizes 0
and appends them after the data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from sluice._errors import CheckpointError, FormatError, IntegrityError, LimitError
from sluice._options import Limits
from sluice.formats.archives.zip_directory import (
    KNOWN_FLAGS,
    LOCAL_HEADER_BYTES,
    ZipRecord,
    read_directory,
    zip64_fields,
)
from sluice.formats.coalesced import read_ranges
from sluice.formats.protocol import Checksum
from sluice.sources.protocol import Source

__all__ = ["locate_records", "read_record", "record_checksums"]

# signature, flags, method, stored bytes, bytes, name bytes, extra bytes
_LOCAL_HEADER = struct.Struct("<4s2xHH8xIIHH")

_IN_ZIP64 = 0xFFFFFFFF

#: Flag bit of records whose sizes follow the data: torch writes zeros in the local header.
_SIZES_FOLLOW = 0x0008


def locate_records(source: Source, records: Sequence[ZipRecord]) -> list[int]:
    """Return the first byte of the data of each record.

    Args:
        source: The archive.
        records: What the central directory says of them, in any order.

    Raises:
        FormatError: A local header contradicts the central directory, or data reaches into what follows it.
    """
    order = sorted(range(len(records)), key=lambda position: records[position].header)
    ordered = [records[position] for position in order]
    headers = read_ranges(source, [record.header for record in ordered], list(map(_header_bytes, ordered)))
    offsets = [_locate(source, record, header) for record, header in zip(ordered, headers, strict=True)]
    located = dict(zip(order, offsets, strict=True))
    return [located[position] for position in range(len(records))]


def read_record(source: Source, record: ZipRecord, max_bytes: int) -> tuple[int, bytes]:
    """Return the offset and the bytes of a small record, checked against its CRC.

    Raises:
        LimitError: It has more than ``max_bytes``.
        FormatError: See ``locate_records``.
        IntegrityError: Its bytes do not have the CRC that the central directory declares.
    """
    if record.nbytes > max_bytes:
        raise LimitError(
            f"record {record.name!r} has more than {max_bytes} bytes", file=source.path, found=record.nbytes
        )
    offset = _locate(source, record, source.read_at(record.header, _header_bytes(record)))
    data = source.read_at(offset, record.nbytes)
    # torch leaves the CRC 0 when it was told not to compute any.
    if record.crc and zlib.crc32(data) != record.crc:
        raise IntegrityError(
            f"record {record.name!r} has another CRC-32",
            file=source.path,
            offset=offset,
            expected=f"{record.crc:#010x}",
            found=f"{zlib.crc32(data):#010x}",
        )
    return offset, data


def record_checksums(source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
    """Return the CRC-32 of each record of an archive, also of those that nothing uses, in the order of the file."""
    records = list(read_directory(source, limits).records())
    try:
        places: list[int | CheckpointError] = list(locate_records(source, records))
    except CheckpointError:  # find out which
        places = [_place_or_error(source, record) for record in records]
    return [
        Checksum(name=record.name, offset=place, nbytes=record.nbytes, crc=record.crc)
        if isinstance(place, int)
        else place
        for record, place in zip(records, places, strict=True)
    ]


def _place_or_error(source: Source, record: ZipRecord) -> int | CheckpointError:
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
            f"the local header of record {record.name!r} declares other sizes",
            file=source.path,
            offset=record.header,
            expected=record.nbytes,
            found=nbytes,
        )
    offset: int = extra + extra_bytes
    if offset + record.nbytes > record.limit:
        raise FormatError(
            f"record {record.name!r} reaches into what follows it",
            file=source.path,
            offset=offset,
            expected=f"at most {record.limit - offset} bytes",
            found=f"{record.nbytes} bytes",
        )
    return offset
