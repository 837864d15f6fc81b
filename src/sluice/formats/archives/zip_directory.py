"""The central directory of a zip archive written by ``torch.save``.

Layout, little-endian, with no bytes before, between or after the parts::

    records                    local header, name, extra field (padding), data, optional data descriptor
    central directory          one entry for each record, in the order of the records
    zip64 end record, locator  always written by torch; by other writers only for large archives
    end record                 22 bytes, no comment

The central directory is read with one read. It holds the offset of the local header of each record, but not the offset
of its data, which depends on the length of the local header (``zip_records``).

Limits: ``Limits.entries`` records and ``Limits.header_bytes`` of central directory, both checked before it is read;
``Limits.name_bytes`` for each name.

Refused, because readers disagree on them or no writer needs them: a comment; bytes before the first record or after the
end record; records that overlap or are out of order; two names that differ only in case; names that are not plain
relative paths under one common directory; directories with data; several disks. Entries of directories, which packers
add, are skipped. Compressed and encrypted records are unsupported, because their data cannot be read in place, except
those of code and further files, which ``torch.jit.save`` compresses.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator

from msgspec import Struct

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError, UnsupportedError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.formats.archives.zip_records import (
    DEFLATED,
    IN_ZIP64,
    KNOWN_FLAGS,
    LOCAL_HEADER_BYTES,
    ZipRecord,
    archive_error,
    zip64_fields,
)
from sluice.sources.protocol import Source

__all__ = ["CentralDirectory", "first_names", "read_directory"]

#: Escape value of the number of entries: the actual value is in the zip64 field.
_MANY_ENTRIES = 0xFFFF

# signature, disk, directory's disk, entries on the disk, entries, directory bytes, directory offset, comment bytes
_END = struct.Struct("<4sHHHHIIH")
# signature, disk of the end record, its offset, disks
_LOCATOR = struct.Struct("<4sIQI")
# signature, bytes that follow, versions, disk, directory's disk, entries on the disk, entries, bytes, offset
_END64 = struct.Struct("<4sQ4xIIQQQQ")
# signature, flags, method, CRC-32, stored bytes, bytes, name, extra and comment bytes, disk, attributes, header offset
_ENTRY = struct.Struct("<4s4xHH4xIIIHHHH2xII")

#: MS-DOS attribute bit of a directory. torch reads no bytes for such a record and returns uninitialized memory.
_IS_DIRECTORY = 0x10

#: Maximum bytes of a record that the central directory does not count: extra field and data descriptor.
_MAX_SLACK_BYTES = 0xFFFF + 24

_TAIL_BYTES = _END.size + _LOCATOR.size + _END64.size

#: Maximum bytes of a central directory that ``first_names`` reads.
_NAMES_BYTES = 1 << 20

#: Bytes at the end of the file in which a misplaced end record is searched, to tell trailing bytes from truncation.
_SEARCH_BYTES = 1 << 20

#: Advice for content that readers of zip archives treat differently.
_ADDED = "torch.save never writes this: remove what was added to the archive, or save the object again."

#: A relative path without empty, "." or ".." components, control characters or backslashes.
_NAME = re.compile(rb"(?:(?!\.{1,2}(?:/|\Z))[^/\\\x00-\x1f\x7f]+(?:/(?!\Z)|\Z))+")

#: Names of compressed records: the code of a program, and files that users add.
_OF_CODE = re.compile(rb"[^/]+/(?:code|extra)/")


class CentralDirectory(Struct, frozen=True, kw_only=True):
    """The central directory, in columns: archives with 100,000 records are common."""

    #: Common directory of all names.
    archive: str
    #: Position of each record, by its name under ``archive``.
    positions: dict[str, int]
    #: Offset of each local header in the file, in bytes, ascending.
    headers: array[int]
    #: Stored size of each record, in bytes.
    sizes: array[int]
    #: CRC-32 of the data of each record; 0 if the writer did not compute it.
    crcs: array[int]
    #: Offset of the central directory in the file, in bytes.
    start: int
    #: Size of the data of each compressed record of code after unpacking, in bytes, by position.
    unpacked: dict[int, int]
    #: Error for the first compressed or encrypted record. Callers raise it, unless they have a more specific reason.
    unsupported: UnsupportedError | LimitError | None

    def __contains__(self, name: str) -> bool:
        return name in self.positions

    def record(self, name: str) -> ZipRecord | None:
        """Return the record with this name under ``archive``, or None."""
        position = self.positions.get(name)
        if position is None:
            return None
        following = position + 1
        return ZipRecord(
            name=f"{self.archive}/{name}",
            header=self.headers[position],
            nbytes=self.sizes[position],
            limit=self.headers[following] if following < len(self.headers) else self.start,
            crc=self.crcs[position],
            unpacked=self.unpacked.get(position),
        )

    def records(self) -> Iterator[ZipRecord]:
        """Yield all records in file order."""
        for name in self.positions:
            record = self.record(name)
            assert record is not None
            yield record


class _End(Struct, frozen=True, kw_only=True):
    """Size and place of the central directory, from the end records."""

    #: Number of entries.
    entries: int
    #: Size, in bytes.
    nbytes: int
    #: Offset in the file, in bytes.
    offset: int


def read_directory(source: Source, limits: Limits) -> CentralDirectory:
    """Read the central directory of the archive.

    Raises:
        TruncatedError: The file ends before its end record.
        FormatError: The archive is inconsistent or does not have the layout above.
        LimitError: The archive exceeds ``Limits.entries``, ``Limits.header_bytes`` or ``Limits.name_bytes``.
    """
    end = _read_end(source)
    for limit, found in (("entries", end.entries), ("header_bytes", end.nbytes)):
        check_limit(limits, limit, found, "the central directory of the archive", file=source.path)
    return _DirectoryParser(source.read_at(end.offset, end.nbytes), end, limits, source.path).parse()


def first_names(source: Source, limits: Limits) -> list[str]:
    """Return the readable names at the start of any central directory, damaged or not, for error messages."""
    try:
        end = _read_end(source)
    except CheckpointError:
        return []
    raw = source.read_at(end.offset, min(end.nbytes, limits.header_bytes, _NAMES_BYTES))
    names, at = [], 0
    while raw.startswith(b"PK\1\2", at) and at + _ENTRY.size <= len(raw):
        name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", raw, at + 28)
        at += _ENTRY.size
        names.append(raw[at : at + name_bytes].decode("utf-8", "backslashreplace"))
        at += name_bytes + extra_bytes + comment_bytes
    return names


def _read_end(source: Source) -> _End:
    size = source.identity.nbytes
    tail = source.read_at(max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
    at = size - _END.size
    if len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\5\6" or tail[-2:] != b"\0\0":
        raise _missing_end(source)
    _, disk, directory_disk, here, entries, nbytes, offset, _ = _END.unpack_from(tail, len(tail) - _END.size)
    if disk or directory_disk or here != entries:
        raise FormatError("the archive spans several disks", file=source.path, offset=at)
    end = _End(entries=entries, nbytes=nbytes, offset=offset)
    locator = -_END.size - _LOCATOR.size
    if tail[locator : locator + 4] == b"PK\6\7":  # empty if the file is shorter
        end, at = _read_end64(source, tail, end), size - _TAIL_BYTES
    if end.offset + end.nbytes != at or end.entries * _ENTRY.size > end.nbytes:
        problem = "the central directory is not at the offset in the end record, or bytes precede the archive"
        expected = f"{end.entries} entries in bytes {end.offset} to {at}"
        raise archive_error(problem, source, at, expected, f"{end.nbytes} bytes")
    return end


def _read_end64(source: Source, tail: bytes, end: _End) -> _End:
    size = source.identity.nbytes
    _, disk, at, disks = _LOCATOR.unpack_from(tail, len(tail) - _END.size - _LOCATOR.size)
    if len(tail) < _TAIL_BYTES or disk or disks != 1 or at != size - _TAIL_BYTES:
        problem, offset = "the zip64 end record does not precede its locator", size - _END.size - _LOCATOR.size
        raise archive_error(problem, source, offset, size - _TAIL_BYTES, at)
    signature, rest, disk, directory_disk, here, entries, nbytes, offset = _END64.unpack_from(tail)
    if signature != b"PK\6\6" or rest != _END64.size - 12 or disk or directory_disk or here != entries:
        raise FormatError("the zip64 end record is damaged", file=source.path, offset=at)
    for small, large, escape in (
        (end.entries, entries, _MANY_ENTRIES),
        (end.nbytes, nbytes, IN_ZIP64),
        (end.offset, offset, IN_ZIP64),
    ):
        if small not in (large, escape):
            raise archive_error("the two end records disagree", source, at, small, large)
    return _End(entries=entries, nbytes=nbytes, offset=offset)


def _missing_end(source: Source) -> FormatError | TruncatedError:
    size = source.identity.nbytes
    start = max(0, size - _SEARCH_BYTES)
    found = source.read_at(start, size - start).rfind(b"PK\5\6", 0, max(0, size - start - _END.size + 4))
    if found >= 0:
        at, expected = start + found + _END.size, "the end of the file"
        return archive_error("bytes follow the end of the archive", source, at, expected, f"{size - at} bytes", _ADDED)
    return TruncatedError("the file ends before the archive's end record", file=source.path, offset=size)


class _DirectoryParser(Struct):
    """Parser of the central directory: one entry after the other, into columns."""

    raw: bytes
    end: _End
    limits: Limits
    file: str
    prefix: bytes = b""
    unpacked: dict[int, int] = {}
    unsupported: UnsupportedError | LimitError | None = None

    def parse(self) -> CentralDirectory:
        positions: dict[str, int] = {}
        headers, sizes, crcs = array("Q"), array("Q"), array("I")
        at = free = 0
        for position in range(self.end.entries):
            following, name, header, nbytes, crc = self._entry(at, position)
            if not free <= header <= free + (_MAX_SLACK_BYTES if position else 0):
                raise self._error("records overlap or leave a gap", at, expected=free, found=header)
            is_directory = name.endswith(b"/") and not nbytes
            key = self._key(name, at, is_directory=is_directory)
            if not is_directory:
                if key in positions:
                    raise self._error(f"two records have the name {_printable(name)}", at, advice=_ADDED)
                positions[key] = position
            headers.append(header)
            sizes.append(nbytes)
            crcs.append(crc)
            free = header + LOCAL_HEADER_BYTES + len(name) + nbytes
            at = following
        if at != len(self.raw) or not free <= self.end.offset <= free + _MAX_SLACK_BYTES:
            raise self._error("the central directory does not end at the offset in the end record", at)
        if len(set(map(str.lower, positions))) != len(positions):  # torch's lookup ignores case
            raise self._error("two records have names that differ only in case", at, advice=_ADDED)
        return CentralDirectory(
            archive=self.prefix[:-1].decode(),
            positions=positions,
            headers=headers,
            sizes=sizes,
            crcs=crcs,
            start=self.end.offset,
            unpacked=self.unpacked,
            unsupported=self.unsupported,
        )

    def _entry(self, at: int, position: int) -> tuple[int, bytes, int, int, int]:
        try:
            signature, flags, method, crc, packed, nbytes, *lengths, disk, attributes, header = _ENTRY.unpack_from(
                self.raw, at
            )
        except struct.error:
            raise self._error("the central directory ends inside an entry", at) from None
        name_bytes, extra_bytes, comment_bytes = lengths
        start = at + _ENTRY.size
        extra = start + name_bytes
        following = extra + extra_bytes + comment_bytes
        if signature != b"PK\1\2" or following > len(self.raw) or disk:
            raise self._error("an entry of the central directory is damaged", at)
        name = self.raw[start:extra]
        if IN_ZIP64 in (packed, nbytes, header):
            fields = zip64_fields(self.raw[extra : extra + extra_bytes], (nbytes, packed, header))
            if fields is None:
                raise self._error(f"record {_printable(name)} has no zip64 field for its sizes", at)
            nbytes, packed, header = fields
        if attributes & _IS_DIRECTORY and (nbytes or not name.endswith(b"/")):
            raise self._error(f"record {_printable(name)} has data, but is marked as a directory", at)
        if method == DEFLATED and not flags & ~KNOWN_FLAGS and _OF_CODE.match(name):
            self.unpacked[position] = nbytes
        elif flags & ~KNOWN_FLAGS or method:
            self._note_unsupported(name, flags, method, nbytes, at)
        if packed != nbytes and not method:
            problem = f"record {_printable(name)} is uncompressed but declares two different sizes"
            raise self._error(problem, at, expected=nbytes, found=packed)
        return following, name, header, packed, crc

    def _key(self, name: bytes, at: int, *, is_directory: bool) -> str:
        if not self.prefix:
            self.prefix = name[: name.find(b"/") + 1]
        if len(name) > self.limits.name_bytes:
            check_limit(self.limits, "name_bytes", len(name), "the name of a record", file=self.file)
        prefix = self.prefix
        plain = name[:-1] if is_directory else name
        if not prefix or not name.startswith(prefix) or not _NAME.fullmatch(plain):
            problem = f"record {_printable(name)} is not a plain path under the directory of the first record"
            raise self._error(problem, at, advice=_ADDED)
        try:
            prefix.decode()  # the common directory is kept as text
            return name[len(prefix) :].decode()
        except UnicodeDecodeError:
            raise self._error(f"the name of record {_printable(name)} is not UTF-8", at, advice=_ADDED) from None

    def _note_unsupported(self, name: bytes, flags: int, method: int, nbytes: int, at: int) -> None:
        if name.endswith(b"/data.pkl") and nbytes > self.limits.header_bytes:
            problem = f"record {_printable(name)} is compressed and has more than {self.limits.header_bytes} bytes"
            self.unsupported = LimitError(problem, file=self.file, offset=self.end.offset + at, found=nbytes)
        if self.unsupported is None:
            how = f"compressed (method {method})" if method else f"encrypted or patched (flags {flags:#x})"
            problem = f"record {_printable(name)} is {how}"
            advice = "Load it with torch.load(mmap=False) and save it again, or repack it without compression."
            self.unsupported = UnsupportedError(
                problem, file=self.file, offset=self.end.offset + at, advice=advice if method else None
            )

    def _error(
        self, problem: str, at: int, *, expected: object = None, found: object = None, advice: str | None = None
    ) -> FormatError:
        offset = self.end.offset + at
        return FormatError(problem, file=self.file, offset=offset, expected=expected, found=found, advice=advice)


def _printable(name: bytes) -> str:
    return ascii(name[:80].decode("utf-8", "replace"))
