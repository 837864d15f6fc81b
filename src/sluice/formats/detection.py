"""Detection of the format of a source from its first bytes; those of the formats that sluice reads exclude each other.

The module of a format is imported only for a file of that format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from sluice._errors import CheckpointError, FormatError, TruncatedError, UnsupportedError
from sluice._options import TEXT_ENCODING
from sluice.formats.archives.tar import is_tar
from sluice.formats.foreign import HEAD_BYTES, recognise
from sluice.formats.protocol import Format
from sluice.sources.protocol import Source

__all__ = [
    "FORMATS",
    "GGUF_MAGIC",
    "LEGACY_MAGIC",
    "Format",
    "Head",
    "KnownFormat",
    "detect",
    "is_gguf",
    "is_safetensors",
    "is_torch_zip",
]

#: The first object of a legacy file.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

#: First bytes of a GGUF file.
GGUF_MAGIC = b"GGUF"

#: First bytes of a pickled 10-byte integer in protocols 2 and 3, and in protocols 4 and 5 with their frame of 13 bytes;
#: the magic number in protocol 1.
_LEGACY_STARTS = (
    *(
        bytes([0x80, protocol]) + frame + b"\x8a\x0a"
        for protocol, frame in [(2, b""), (3, b""), (4, b"\x95\x0d" + bytes(7)), (5, b"\x95\x0d" + bytes(7))]
    ),
    b"L%dL\n." % LEGACY_MAGIC,
)

#: The start of a JSON object after its length.
_BRACE = re.compile(rb'\{[\t\n\r\x20]*+["}]')

#: Bytes of text. Eight of them are not a length but text in a different format.
_PRINTABLE = b"\t\n\r" + bytes(range(0x20, 0x7F))

#: Smallest file of any format: a zip file has at least 22 bytes, a safetensors file 10.
_SMALLEST_BYTES = 10

#: Match the head of a zip archive, and of a GGUF file.
is_torch_zip, is_gguf = re.compile(b"PK\3\4").match, re.compile(GGUF_MAGIC).match


def _is_torch_legacy(head: bytes) -> bool:
    """Return whether a file with this head starts as a legacy file does, and torch would not take it for tar."""
    claimed = any(head.startswith(start) or start.startswith(head) for start in _LEGACY_STARTS)
    return claimed and not is_tar(head)


def is_safetensors(head: bytes) -> bool:
    """Return whether a file with this head starts with the length and the first bytes of a safetensors header."""
    return _BRACE.match(head, 8) is not None and bool(head[:8].translate(None, _PRINTABLE)) and head[:4] != GGUF_MAGIC


class KnownFormat(NamedTuple):
    """A format that sluice reads. Its module is imported for the first such file: most programs need only one."""

    #: Its name, as in ``Format``.
    name: str
    #: Whether the first bytes of a file, up to 4096, indicate it.
    matches: Callable[[bytes], object]
    #: Module and name of its class, below ``sluice.formats``.
    where: str


#: The formats that sluice reads.
FORMATS = (
    KnownFormat("torch-zip", is_torch_zip, "torch_save.zip_format.TorchZipFormat"),
    KnownFormat("safetensors", is_safetensors, "safetensors.reader.SafetensorsFormat"),
    KnownFormat("torch-legacy", _is_torch_legacy, "torch_save.legacy_format.TorchLegacyFormat"),
    KnownFormat("gguf", is_gguf, "gguf.reader.GgufFormat"),
)


class Head(NamedTuple):
    """The beginning of a file, looked at once."""

    #: The source, through which headers are read.
    source: Source
    #: The bytes that are examined.
    data: bytes
    #: The format that they indicate; None for anything else.
    known: KnownFormat | None

    @classmethod
    def of(cls, source: Source) -> Head:
        """Look at an open source; nothing else of it is read."""
        data = source.read_at(0, min(HEAD_BYTES, source.identity.nbytes))
        for known in FORMATS:
            if known.matches(data):
                return cls(source, data, known)
        return cls(source, data, None)


def detect(source: Source | Head, *, encoding: str = TEXT_ENCODING) -> Format:
    """Return the format that the first bytes of a source indicate.

    Args:
        source: An open source, or its head.
        encoding: Encoding of text that Python 2 wrote, for the formats that can contain it.

    Raises:
        TruncatedError: It is too short for any format.
        UnsupportedError: It is of a kind that sluice recognizes but does not read; the message names it.
        IncompleteCheckpointError: It is a placeholder of a file that was not downloaded completely.
        FormatError: It is of an unknown kind.

    Example:
        >>> detect(LocalFile("model.safetensors")).name
        'safetensors'
    """
    head = source if isinstance(source, Head) else Head.of(source)
    if len(head.data) < _SMALLEST_BYTES:
        problem, least = "the file is too short to be a checkpoint", f"at least {_SMALLEST_BYTES} bytes"
        raise TruncatedError(problem, file=head.source.path, expected=least, found=head.data)
    # The first bytes of a pickle or gzip file can be a safetensors length: formats are tried before other kinds.
    if head.known is None:
        raise _foreign(head.source, head.data)
    module, _, name = head.known.where.rpartition(".")
    made: Format = getattr(import_module(f"sluice.formats.{module}"), name)(encoding=encoding)
    return made


def _foreign(source: Source, head: bytes) -> CheckpointError:
    """Return the error for a file that is of none of the formats."""
    error = recognise(head, source.path)
    if is_tar(head):
        error = UnsupportedError("this is a tar archive among other files, or inside one", file=source.path)
    if error is not None:
        return error
    problem = "not a recognized checkpoint format"
    expected, advice = "a torch.save, safetensors or GGUF file", CheckpointError.advice
    unknown = FormatError(problem, file=source.path, offset=0, expected=expected, found=head[:16], advice=advice)
    unknown.foreign = True
    return unknown
