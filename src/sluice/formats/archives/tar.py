"""Tar archives: what ``torch.save`` wrote before 0.2, and what people pack checkpoints in. Neither is read.

The error says how to go on, and for torch's that means its own loader, which unpacks members to the disk. So the
headers are looked at first: names that lead elsewhere, links, devices, sparse members and sizes beyond the file are
refused as what they are. Nothing is extracted, and no more than the first headers are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice._errors import CheckpointError, FormatError, PathEscapeError, UnsupportedError
from sluice.sources.protocol import Source

if TYPE_CHECKING:
    from tarfile import TarInfo

__all__ = ["is_tar", "refuse_tar"]

_BLOCK_BYTES = 512

#: Members whose headers are looked at. torch wrote four, each behind one of extended attributes at most.
_MEMBERS = 16

#: The members of torch's archives.
_TORCH_NAMES = frozenset({"sys_info", "pickle", "tensors", "storages"})

#: Types of members: regular files, directories, and names and attributes of the next member.
_PLAIN_TYPES = frozenset({b"0", b"\0", b"7", b"5", b"x", b"g", b"L", b"K"})


def is_tar(head: bytes) -> bool:
    """Return whether torch, which asks for a tar archive first, would take a file that starts so for one."""
    return _header(head[:_BLOCK_BYTES]) is not None


def refuse_tar(source: Source) -> CheckpointError:
    """Return the error for a tar archive.

    It is an ``UnsupportedError`` with what to do, ``PathEscapeError`` for names that lead out of a directory, and
    ``FormatError`` for members that no archive of torch has.
    """
    members = _members(source)
    names = {member.name for _, member in members}
    torch_wrote_it = any(name.rpartition("/")[2] in _TORCH_NAMES for name in names)
    for offset, member in members:
        if member.name.startswith("/") or ".." in member.name.split("/"):
            problem = "a member of this tar archive leads out of any directory that it is unpacked in"
            found, advice = repr(member.name), "Do not unpack it."
            return PathEscapeError(problem, file=source.path, offset=offset, found=found, advice=advice)
        if torch_wrote_it and member.type not in _PLAIN_TYPES:
            problem = f"member {member.name!r} of this tar archive is a link, a device or sparse"
            return FormatError(problem, file=source.path, offset=offset, found=f"type {member.type!r}")
        if member.size > source.identity.nbytes - offset - _BLOCK_BYTES:
            problem = f"member {member.name!r} of this tar archive reaches past the end of the file"
            return FormatError(problem, file=source.path, offset=offset, found=f"{member.size} bytes")
    if not torch_wrote_it:
        advice = "Unpack it, and open the checkpoint that is inside."
        return UnsupportedError("this is a tar archive, which sluice does not read", file=source.path, advice=advice)
    problem = "this is a tar archive, as torch.save wrote them before 0.2"
    if "pickle" not in names:
        return FormatError(f"{problem}, without the member 'pickle'", file=source.path)
    advice = "If you trust it, load it with torch.load(weights_only=False) and save its tensors with torch.save."
    return UnsupportedError(problem, file=source.path, advice=advice)


def _members(source: Source) -> list[tuple[int, TarInfo]]:
    """Return the first members with the offsets of their headers, up to one that is none."""
    members: list[tuple[int, TarInfo]] = []
    at = 0
    while len(members) < _MEMBERS and at + _BLOCK_BYTES <= source.identity.nbytes:
        member = _header(source.read_at(at, _BLOCK_BYTES))
        if member is None:
            break
        members.append((at, member))
        at += _BLOCK_BYTES + -(-max(0, member.size) // _BLOCK_BYTES) * _BLOCK_BYTES
    return members


def _header(block: bytes) -> TarInfo | None:
    import tarfile  # seldom needed, and slow to import

    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
