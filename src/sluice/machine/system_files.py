"""Small files of the operating system below ``/proc`` and ``/sys``, read with three system calls each."""

from __future__ import annotations

import io
import os

__all__ = ["read_system_file", "write_system_file"]

#: Most bytes of such a file. The kernel writes one page for most of them.
_MOST_BYTES = 1 << 16


# Both use a file object, not a descriptor: an interrupt right after the file was opened closes it, too. An opener in
# Python would be interrupted before it returns the descriptor. These file systems create and truncate nothing.


def read_system_file(path: str) -> bytes | None:
    """Return the first 64 KiB of a file; None if it does not exist or cannot be read."""
    try:
        with io.FileIO(path, opener=os.open) as file:
            return file.read(_MOST_BYTES)
    except OSError:  # also if the file is of a process that has ended
        return None


def write_system_file(path: str, data: bytes) -> bool:
    """Write to a file; return whether it exists and the system took the data."""
    try:
        with io.FileIO(path, "w", opener=os.open) as file:
            return file.write(data) == len(data)
    except OSError:
        return False
