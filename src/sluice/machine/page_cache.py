"""Probes of the page cache: the cached share of each part of a file, found without waiting for the disk.

The kernel counts the pages of a range if it can (``sources/pages.py``). Otherwise single bytes are read without
waiting (``RWF_NOWAIT``). Such a probe fails if its page is not cached, but the kernel starts to read that page
nevertheless; so its offset is random, and the next load does not probe the same page.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from sluice import _defaults as defaults
from sluice.sources.pages import cached_bytes, resident_bytes

__all__ = ["probe_cache"]


def probe_cache(descriptor: int, offsets: range) -> tuple[float, ...]:
    """Return the cached share of each part of a file, from 0 to 1.

    Args:
        descriptor: The open file.
        offsets: First byte of each part; ``offsets.stop`` is the size of the file.

    Returns:
        One share per part, 0 or 1 if the kernel does not count pages; empty if it does not support probing.
    """
    count = _counter(descriptor) if offsets else None
    if count is None:
        return _probe_bytes(descriptor, offsets)
    shares = []
    for offset in offsets:
        nbytes = min(defaults.PROBE_BYTES, offsets.step, offsets.stop - offset)
        shares.append(min(1.0, count(descriptor, offset, nbytes) / nbytes))
    return tuple(shares)


def _counter(descriptor: int) -> Callable[[int, int, int], int] | None:
    """Return a function that counts a page that was just read and so is certainly cached; None if there is none."""
    if not hasattr(os, "pread"):  # Windows
        return None
    try:
        os.pread(descriptor, 1, 0)
    except OSError:  # a failing disk fails again when the plan reads
        return None
    return next((count for count in (cached_bytes, resident_bytes) if count(descriptor, 0, 1) > 0), None)


def _probe_bytes(descriptor: int, offsets: range) -> tuple[float, ...]:
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return ()
    found = []
    one = bytearray(1)
    for offset in offsets:
        anywhere = offset + int.from_bytes(os.urandom(8)) % min(offsets.step, offsets.stop - offset)
        try:
            found.append(float(os.preadv(descriptor, [one], anywhere, nowait) == 1))
        except BlockingIOError:
            found.append(0.0)
        except OSError:  # unsupported here; a failing disk fails again when the plan reads
            return ()
    return tuple(found)
