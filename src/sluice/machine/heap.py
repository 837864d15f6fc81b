"""The heap of the C library."""

from __future__ import annotations

import ctypes

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Return freed memory of all threads to the system, where the C library can: in glibc.

    It keeps what was freed in blocks below a size that grows with the blocks that are freed, up to 32 MiB
    (``M_MMAP_THRESHOLD`` in mallopt(3)).
    """
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
