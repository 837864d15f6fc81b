"""Refusal of tar archives: files written by ``torch.save`` before 0.2, and checkpoints packed by hand.

Neither kind is read. The error advises how to proceed. For a file written by torch, the advice is torch's own loader,
which extracts members to disk, so the first headers are checked for content that makes extraction unsafe: names outside
the target directory, links, devices, sparse members, and sizes beyond the end of the file. Each has its own error.

Limits: at most 16 member headers are read, 512 bytes each. Member data is neither read nor extracted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice._errors import CheckpointError, FormatError, PathEscapeError, UnsupportedError
from sluice.sources.protocol import Source

if TYPE_CHECKING:
    from tarfile import TarInfo

__all__ = ["is_tar", "refuse_tar"]

_BLOCK_BYTES = 512

#: Maximum number of member headers to check. torch wrote four members, each after at most one extended header.
_MAX_MEMBERS = 16

#: Member names of archives written by torch.
_TORCH_NAMES = frozenset({"sys_info", "pickle", "tensors", "storages"})

#: Permitted member types: regular files, directories, and long names or attributes of the next member.
_PLAIN_TYPES = frozenset({b"0", b"\0", b"7", b"5", b"x", b"g", b"L", b"K"})


def is_tar(head: bytes) -> bool:
    """Return whether torch, which tries tar before its other formats, would treat a file with this head as tar."""
    return _parse_header(head[:_BLOCK_BYTES]) is not None


def refuse_tar(source: Source) -> CheckpointError:
    """Return the error for a tar archive.

    Returns:
        ``PathEscapeError`` for a member name outside the target directory, ``FormatError`` for a damaged archive or a
        member that torch never writes, otherwise ``UnsupportedError`` with advice.
    """
    members = _members(source)
    names = {member.name for _, member in members}
    from_torch = any(name.rpartition("/")[2] in _TORCH_NAMES for name in names)
    for offset, member in members:
        if member.name.startswith("/") or ".." in member.name.split("/"):
            problem = "a member of this tar archive would be extracted outside the target directory"
            found, advice = repr(member.name), "Do not unpack it."
            return PathEscapeError(problem, file=source.path, offset=offset, found=found, advice=advice)
        if from_torch and member.type not in _PLAIN_TYPES:
            problem = f"member {member.name!r} of this tar archive is a link, a device or sparse"
            found, advice = f"type {member.type!r}", "Do not unpack it."
            return FormatError(problem, file=source.path, offset=offset, found=found, advice=advice)
        if member.size > source.identity.nbytes - offset - _BLOCK_BYTES:
            problem = f"member {member.name!r} of this tar archive extends past the end of the file"
            return FormatError(problem, file=source.path, offset=offset, found=f"{member.size} bytes")
    if not from_torch:
        advice = "Unpack it and open the checkpoint inside."
        return UnsupportedError("this is a tar archive, which sluice does not read", file=source.path, advice=advice)
    problem = "this is a tar archive, as written by torch.save before 0.2"
    if "pickle" not in names:
        advice = CheckpointError.advice
        return FormatError(f"{problem}, without the member 'pickle'", file=source.path, advice=advice)
    advice = "If you trust it, load it with torch.load(weights_only=False) and save its tensors with torch.save."
    return UnsupportedError(problem, file=source.path, advice=advice)


def _members(source: Source) -> list[tuple[int, TarInfo]]:
    """Return the first members with the offsets of their headers, up to the first block that is not a header."""
    members: list[tuple[int, TarInfo]] = []
    offset = 0
    while len(members) < _MAX_MEMBERS and offset + _BLOCK_BYTES <= source.identity.nbytes:
        member = _parse_header(source.read_at(offset, _BLOCK_BYTES))
        if member is None:
            break
        members.append((offset, member))
        offset += _BLOCK_BYTES + -(-max(0, member.size) // _BLOCK_BYTES) * _BLOCK_BYTES
    return members


def _parse_header(block: bytes) -> TarInfo | None:
    import tarfile  # rarely needed, and slow to import

    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
