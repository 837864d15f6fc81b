"""Tar archives: the files of a checkpoint inside one file, such as NeMo's ``.nemo``, read where they lie.

Layout: for each member a header of 512 bytes with its name, type, size and a checksum, then its data, padded to 512
bytes; then two blocks of zeros. Headers of types ``x``, ``L`` and ``K`` hold attributes of the next member, such as a
long name or a large size. Nothing is extracted: a member is a range of bytes of the archive, and so a file of a
directory.

A directory that holds all members is left out of their names.

Archives of ``torch.save`` before 0.2 are tar archives too. They are refused: torch's own loader extracts their members
to disk, so the error advises it only if that is safe.

Limits: ``Limits.files`` members, ``Limits.name_bytes`` for each name. Refused: names outside the directory; two members
with one name; links, devices and sparse members if they are needed; members that extend past the end of the archive;
other bytes between members; an archive without a block of zeros at its end, from which members may be missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from sluice._errors import TRUST_TORCH, FormatError, MissingFileError, PathEscapeError, TruncatedError, UnsupportedError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.sources.directory import EntryKind
from sluice.sources.protocol import Source
from sluice.sources.wrappers import Section

if TYPE_CHECKING:
    from tarfile import TarInfo

__all__ = ["ArchiveMember", "TarDirectory", "is_tar"]

_BLOCK_BYTES = 512

#: The checksum of a header; binary numbers start with one of two bytes.
_CHECKSUM, _CHECKSUM_BYTES = re.compile(rb"[ \0]*[0-7]+[ \0]*|[\x80\xff].*", re.DOTALL), slice(148, 156)

#: Member names of archives written by torch.
_TORCH_NAMES = frozenset({"sys_info", "pickle", "tensors", "storages"})

#: Types of regular files, of headers with attributes of the next member, and of those that hold its name.
_FILES, _ATTRIBUTES, _LONG_NAME = frozenset({b"0", b"\0", b"7"}), frozenset({b"x", b"g", b"L", b"K"}), b"L"


class ArchiveMember(Section):
    """A file in an archive; see ``Source``."""

    def __init__(self, archive: Source, name: str, start: int, nbytes: int) -> None:
        super().__init__(archive, start, nbytes)
        #: The archive.
        self.archive = archive
        self.path = f"{archive.path}/{name}"

    def close(self) -> None:
        """Close the archive, which other members open again."""
        self.archive.close()


class _Member(NamedTuple):
    """One member; also the listing of a subdirectory. See ``DirectoryEntry``."""

    name: str
    kind: EntryKind
    #: First byte of its data, and number of bytes.
    start: int = 0
    nbytes: int = 0


class TarDirectory:
    """The members of a tar archive; see ``Directory``."""

    def __init__(self, source: Source, limits: Limits) -> None:
        """Read the headers.

        Args:
            source: The archive.
            limits: Bounds for hostile files.

        Raises:
            UnsupportedError: It was written by torch before 0.2.
            PathEscapeError: The name of a member leads outside.
            FormatError: It is damaged, or two members have one name.
            TruncatedError: It ends after a member or in a header.
            LimitError: It exceeds the limits.
        """
        self.path = source.path
        self._source = source
        self._members: dict[str, _Member] = {}
        for member in _members(source, limits):
            if member.name in self._members and "directory" not in {member.kind, self._members[member.name].kind}:
                problem = f"two members of this tar archive have the name {member.name!r}"
                raise FormatError(problem, file=source.path, offset=member.start)
            self._members[member.name] = member
        files = [name for name, member in self._members.items() if member.kind != "directory"]
        common = os.path.commonprefix([min(files), max(files)]) if files else ""  # noqa: RUF071 - cut at a slash below
        top = common[: common.rfind("/") + 1]
        self._members = {name[len(top) :]: one for name, one in self._members.items() if name.startswith(top)}
        if _TORCH_NAMES & self._members.keys():
            problem = "this is a tar archive, as written by torch.save before 0.2"
            if any(member.kind == "special" for member in self._members.values()):
                problem = f"{problem}, with a member that is a link, a device or sparse"
                raise FormatError(problem, file=self.path, advice="Do not unpack it.")
            raise UnsupportedError(problem, file=self.path, advice=TRUST_TORCH)

    def entries(self) -> Iterator[_Member]:
        first: dict[str, _Member] = {}
        for name, member in self._members.items():
            top, slash, _ = name.partition("/")
            first[top] = _Member(top, "directory") if slash else member._replace(name=top)
        return iter(first.values())

    def open(self, name: str) -> Source:
        member = self._members.get(name)
        if member is not None and member.kind == "file" and member.nbytes:
            return ArchiveMember(self._source, name, member.start, member.nbytes)
        self.close()  # no member does, if this was the first
        path = f"{self.path}/{name}"
        if member is None:
            raise MissingFileError("the archive has no such member", file=path) from FileNotFoundError(path)
        what = "is empty" if member.kind == "file" else "is a link, a device, sparse or a directory"
        raise FormatError(f"this member of a tar archive {what}", file=path, offset=member.start)

    def close(self) -> None:
        """Close the archive."""
        self._source.close()

    def check_inside(self, name: str) -> None:
        """Return: names were checked, and links are not opened."""


def is_tar(head: bytes) -> bool:
    """Return whether torch, which tries tar before its other formats, would treat a file with this head as tar."""
    return _parse_header(head[:_BLOCK_BYTES]) is not None


def _members(source: Source, limits: Limits) -> Iterator[_Member]:
    """Yield the members; directories and special files are of their kinds."""
    size, offset, count = source.identity.nbytes, 0, 0
    name, nbytes = "", -1  # of the next member, from attributes
    while offset + _BLOCK_BYTES <= size:
        block = source.read_at(offset, _BLOCK_BYTES)
        if not any(block):
            return
        header = _parse_header(block)
        if header is None or header.size < 0:
            raise FormatError("a member of this tar archive has a damaged header", file=source.path, offset=offset)
        count += 1
        check_limit(limits, "files", count, "the tar archive", file=source.path)
        start = offset + _BLOCK_BYTES
        length = header.size if nbytes < 0 or header.type in _ATTRIBUTES else nbytes
        if length > size - start:
            problem = f"member {header.name!r} of this tar archive extends past the end of the file"
            raise FormatError(problem, file=source.path, offset=offset, found=f"{length} bytes")
        if header.type in _ATTRIBUTES:
            check_limit(limits, "name_bytes", length, "a name in the tar archive", file=source.path, offset=offset)
            found = _attributes(source.read_at(start, length), header, source, offset)
            name, nbytes = found[0] or name, nbytes if found[1] < 0 else found[1]
        else:
            kind: EntryKind = "directory" if header.isdir() else "file" if header.type in _FILES else "special"
            plain = _plain_name(name or header.name, source, offset)
            if plain:
                yield _Member(plain, kind, start, length)
            name, nbytes = "", -1
        offset = start + -(-length // _BLOCK_BYTES) * _BLOCK_BYTES
    problem = "the tar archive ends without its end block"  # members may be missing
    raise TruncatedError(problem, file=source.path, offset=offset, found=f"{size} bytes")


def _plain_name(name: str, source: Source, offset: int) -> str:
    """Return the name of a member relative to the archive, without ``.``."""
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        problem = "a member of this tar archive would be extracted outside the target directory"
        advice = "Do not unpack it."
        raise PathEscapeError(problem, file=source.path, offset=offset, found=repr(name)[:200], advice=advice)
    return "/".join(parts)


def _attributes(data: bytes, header: TarInfo, source: Source, offset: int) -> tuple[str, int]:
    """Return the name and the size of the next member; empty and negative if they are not among its attributes."""
    if header.type == _LONG_NAME:
        return data.rstrip(b"\0").decode("utf-8", "surrogateescape"), -1
    name, nbytes, at = "", -1, 0
    end = len(data.rstrip(b"\0")) if header.type == b"x" else 0
    while at < end:
        length = data[at : max(at, data.find(b" ", at, at + 20))]
        record = data[at : at + int(length)] if length.isdigit() else b""
        key, equals, value = record[len(length) + 1 : -1].partition(b"=")
        if not equals or len(record) != int(length) or record[-1:] != b"\n" or (key == b"size" and not value.isdigit()):
            problem = "the attributes of a member of this tar archive are damaged"
            raise FormatError(problem, file=source.path, offset=offset)
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif key == b"size":
            nbytes = int(value[:20])
        at += len(record)
    return name, nbytes


def _parse_header(block: bytes) -> TarInfo | None:
    if not _CHECKSUM.fullmatch(block[_CHECKSUM_BYTES]):
        return None
    import tarfile  # rarely needed, and slow to import

    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
