"""The first bytes of the formats that sluice reads. They exclude each other.

They are apart from the formats so that ``detection`` imports only the format that a file has.
"""

from __future__ import annotations

import re

from sluice.formats.archives.tar import is_tar

__all__ = ["GGUF_MAGIC", "LEGACY_MAGIC", "is_gguf", "is_safetensors", "is_torch_legacy", "is_torch_zip"]

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


def is_torch_zip(head: bytes) -> bool:
    """Return whether a file with this head is a zip archive."""
    return head.startswith(b"PK\3\4")


def is_torch_legacy(head: bytes) -> bool:
    """Return whether a file with this head starts as a legacy file does, and torch would not take it for tar."""
    claimed = any(head.startswith(start) or start.startswith(head) for start in _LEGACY_STARTS)
    return claimed and not is_tar(head)


def is_safetensors(head: bytes) -> bool:
    """Return whether a file with this head starts with the length and the first bytes of a safetensors header."""
    return _BRACE.match(head, 8) is not None and bool(head[:8].translate(None, _PRINTABLE)) and head[:4] != GGUF_MAGIC


def is_gguf(head: bytes) -> bool:
    """Return whether a file with this head starts as a GGUF file does."""
    return head.startswith(GGUF_MAGIC)
