"""What the bytes of a source mean: one module for each format, and ``detect``, which tells them apart."""

from __future__ import annotations

import re
from typing import NamedTuple

from sluice._errors import CheckpointError, FormatError, IncompleteCheckpointError, TruncatedError, UnsupportedError
from sluice.formats._legacy import Legacy
from sluice.formats._protocol import Format
from sluice.formats._safetensors import Safetensors
from sluice.formats._torch_zip import TorchZip
from sluice.sources import Source

__all__ = ["FORMATS", "Format", "detect"]

#: The formats that sluice reads. Their first bytes exclude each other.
FORMATS: tuple[Format, ...] = (TorchZip(), Legacy(), Safetensors())

#: Bytes that are looked at: a tar header is 512, a line of JSON that names its kind comes early.
_HEAD_BYTES = 4096

#: A shorter file is none of the formats: a zip file has 22 bytes at least, a safetensors file 10.
_SMALLEST_BYTES = 10


class _Recognised(NamedTuple):
    """A kind of file that people pass by mistake, or that sluice does not read yet."""

    start: re.Pattern[bytes]
    error: type[CheckpointError]
    problem: str


def _recognised(start: bytes, error: type[CheckpointError], problem: str) -> _Recognised:
    return _Recognised(re.compile(start, re.DOTALL), error, problem)


def _unread(start: bytes, kind: str) -> _Recognised:
    return _recognised(start, UnsupportedError, f"this is {kind}, which sluice does not read")


#: An npz file is a zip file too, so this is asked before ``FORMATS``; byte 30 is the name of a zip's first member.
_NPZ = _unread(rb"PK\x03\x04.{26}[^/\x00]{1,200}?\.npy", "a numpy .npz archive")

#: Asked in this order after ``FORMATS``: the first two bytes of a pickle or gzip file can be a safetensors length.
_RECOGNISED = (
    # The integer 0x1950a86a20f9469cfc6c.
    _unread(rb"L119547037146038801333356L?\n\.", "a legacy torch.save file in pickle protocol 0 or 1"),
    _recognised(
        rb".{257}ustar",
        UnsupportedError,
        "this is a tar archive, as torch.save wrote them before 0.2: if you trust it, read it with "
        "torch.load(weights_only=False) and write it again with torch.save",
    ),
    _unread(rb"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    _unread(rb"GGUF", "a GGUF file"),
    _unread(rb"\x93NUMPY", "a numpy .npy file"),
    _unread(rb"\x1f\x8b", "a gzip-compressed file"),
    _unread(rb"\x28\xb5\x2f\xfd", "a zstd-compressed file"),
    _unread(rb"BZh[1-9]1AY&SY|\xfd7zXZ\x00", "a bzip2- or xz-compressed file"),
    _unread(rb"\x80[\x02-\x05]", "a bare pickle, not written by torch.save"),
    _recognised(
        rb"version https://git-lfs",
        IncompleteCheckpointError,
        "this is a git-lfs pointer in place of the file: run 'git lfs pull'",
    ),
    _recognised(
        rb"\s*(?i:<!doctype|<html|<\?xml)",
        FormatError,
        "this is a web page in place of the file: its address is wrong or asks for a login",
    ),
    _recognised(
        rb'\s*\{.*"weight_map"',
        UnsupportedError,
        "this is the index of a sharded checkpoint under a name that does not end in .json",
    ),
    _unread(rb"\s*[{\[]", "JSON text"),
    _recognised(
        rb"\x00{64}",
        IncompleteCheckpointError,
        "the file starts with zeros: its download or copy has never finished",
    ),
)


def detect(source: Source) -> Format:
    """Return the format that the first bytes of a source claim; nothing else is read.

    Args:
        source: An open source.

    Raises:
        TruncatedError: It is too short to be any format.
        UnsupportedError: It is of a kind that sluice recognises but does not read; the message names it.
        IncompleteCheckpointError: It stands for a file that was never downloaded in full.
        FormatError: It is none of these.

    Example:
        >>> detect(LocalFile("model.safetensors")).name
        'safetensors'
    """
    size = source.identity.nbytes
    head = source.read_at(0, min(_HEAD_BYTES, size))
    if size < _SMALLEST_BYTES:
        problem = "the file is too short to be a checkpoint"
        raise TruncatedError(problem, file=source.path, expected=f"at least {_SMALLEST_BYTES} bytes", found=head)
    if _NPZ.start.match(head):
        raise _NPZ.error(_NPZ.problem, file=source.path)
    for candidate in FORMATS:
        if candidate.matches(head):
            return candidate
    for kind in _RECOGNISED:
        if kind.start.match(head):
            raise kind.error(kind.problem, file=source.path)
    problem = "this is no checkpoint that sluice knows"
    raise FormatError(problem, file=source.path, offset=0, expected="a torch.save or safetensors file", found=head[:16])
