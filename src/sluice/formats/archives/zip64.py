"""The zip64 part of an extra field: 64-bit values of the fields that hold an escape value."""

from __future__ import annotations

import struct

__all__ = ["zip64_fields"]

#: Escape value: the actual value is in the zip64 part.
_IN_ZIP64_32 = 0xFFFFFFFF

_ZIP64_EXTRA = 1


def zip64_fields(extra: bytes, fields: tuple[int, ...]) -> tuple[int, ...] | None:
    """Replace the escaped values in ``fields`` by their 64-bit values from the zip64 part of an extra field.

    Args:
        extra: The whole extra field.
        fields: 32-bit values in the order of the zip64 part; 0xFFFFFFFF is the escape.

    Returns:
        The values, or None if the zip64 part is missing or too short.
    """
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == _ZIP64_EXTRA and at + nbytes <= len(extra):
            values = iter(struct.unpack_from(f"<{nbytes // 8}Q", extra, at))
            filled = (next(values, None) if field == _IN_ZIP64_32 else field for field in fields)
            found = tuple(value for value in filled if value is not None)
            return found if len(found) == len(fields) else None
        at += nbytes
    return None
