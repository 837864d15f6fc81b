"""Small files of the operating system below ``/proc`` and ``/sys``, read with three system calls each."""

from __future__ import annotations

import io
import os

__all__ = ["read_system_file"]

#: Most bytes of such a file. The kernel writes one page for most of them.
_MOST_BYTES = 1 << 16


def read_system_file(path: str) -> bytes | None:
    """Return the first 64 KiB of a file; None if it does not exist or cannot be read."""
    try:
        # A file object, not a descriptor: an interrupt right after it was opened closes it, too.
        with io.FileIO(path, opener=os.open) as file:
            return file.read(_MOST_BYTES)
    except OSError:  # also if the file is of a process that has ended
        return None
