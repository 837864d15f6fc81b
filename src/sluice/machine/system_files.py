"""Small files of the operating system below ``/proc`` and ``/sys``, read with three system calls each."""

from __future__ import annotations

import os

__all__ = ["read_system_file"]

#: Most bytes of such a file. The kernel writes one page for most of them.
_MOST_BYTES = 1 << 16


def read_system_file(path: str) -> bytes | None:
    """Return the first 64 KiB of a file; None if it does not exist or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None
    try:
        return os.read(descriptor, _MOST_BYTES)
    except OSError:  # a process that has ended
        return None
    finally:
        os.close(descriptor)
