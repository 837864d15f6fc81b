"""Where the data of zip records lies: local headers, read together where they are close.

A local header is 30 bytes, the name and an extra field of a length that only the header says; the data follows. torch
pads the extra field so that the data starts at a multiple of 64, leaves CRC and sizes 0
and appends them after the data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from sluice._errors import FormatError, IntegrityError, LimitError
from sluice._options import COALESCE_GAP_BYTES
from sluice.formats._zip import KNOWN_FLAGS, LOCAL_HEADER_BYTES, Record, zip64_fields
from sluice.sources import Source

__all__ = ["locate_records", "read_record"]

# signature, flags, method, stored bytes, bytes, name bytes, extra bytes
_LOCAL_HEADER = struct.Struct("<4s2xHH8xIIHH")

_IN_ZIP64 = 0xFFFFFFFF

#: Flag bit of records whose sizes follow the data: torch writes zeros in the local header.
_SIZES_FOLLOW = 0x0008

#: Threads that read headers: each waits for one cold page, so that more than the cores pay.
_THREADS = 8

#: Most bytes of one read for several headers, 8 MiB over all threads.
_SPAN_BYTES = 1 << 20

#: Reads from which on threads pay: starting them takes about as long as eight cold pages.
_READS_FOR_THREADS = 8


def locate_records(source: Source, records: Sequence[Record]) -> list[int]:
    """Return the first byte of the data of each record.

    Args:
        source: The archive.
        records: What the central directory says of them, in any order.

    Raises:
        FormatError: A local header contradicts the central directory, or data reaches into what follows it.
    """
    order = sorted(range(len(records)), key=lambda position: records[position].header)
    spans = list(_spans([records[position] for position in order]))
    located = dict(zip(order, _locate_spans(source, spans), strict=True))
    return [located[position] for position in range(len(records))]


def read_record(source: Source, record: Record, max_bytes: int) -> tuple[int, bytes]:
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
    offset = locate_records(source, [record])[0]
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


def _spans(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Group records in file order so that the headers of a group are worth one read."""
    span: list[Record] = []
    for record in records:
        if span:
            gap = record.header - _header_end(span[-1])
            if gap > COALESCE_GAP_BYTES or _header_end(record) - span[0].header > _SPAN_BYTES:
                yield span
                span = []
        span.append(record)
    if span:
        yield span


def _header_end(record: Record) -> int:
    return record.header + LOCAL_HEADER_BYTES + len(record.name.encode())


def _locate_spans(source: Source, spans: list[list[Record]]) -> list[int]:
    def locate(some: list[list[Record]]) -> list[int]:
        return [offset for span in some for offset in _locate_span(source, span)]

    if len(spans) < _READS_FOR_THREADS:
        return locate(spans)
    share = -(-len(spans) // _THREADS)
    shares = [spans[first : first + share] for first in range(0, len(spans), share)]
    try:
        with ThreadPoolExecutor(len(shares), thread_name_prefix="sluice-headers") as pool:
            return list(chain.from_iterable(pool.map(locate, shares)))
    except RuntimeError:  # the process may not start another thread
        return locate(spans)


def _locate_span(source: Source, span: list[Record]) -> list[int]:
    start = span[0].header
    data = source.read_at(start, _header_end(span[-1]) - start)
    return [_locate(source, record, data, record.header - start) for record in span]


def _locate(source: Source, record: Record, data: bytes, at: int) -> int:
    signature, flags, method, packed, nbytes, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(data, at)
    name = data[at + LOCAL_HEADER_BYTES : at + LOCAL_HEADER_BYTES + name_bytes]
    if signature != b"PK\3\4" or method or flags & ~KNOWN_FLAGS or name != record.name.encode():
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
