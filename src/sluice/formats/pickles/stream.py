"""Pickles inside a larger file: where one ends only its own opcodes say.

The file is read in windows as the unpickler asks for more: 4 KiB first, then each twice the last, at most 1 MiB. So
what is read beyond the end of a pickle is no longer than the pickle itself, and never more than 1 MiB, and no more of
it is in memory at once. Only text or bytes longer than a window make it grow further.
"""

from __future__ import annotations

from typing import NamedTuple

from sluice._errors import LimitError, TruncatedError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import Allowlist, Unpickler
from sluice.sources.protocol import Source

__all__ = ["Unpickled", "unpickle_at"]

_FIRST_WINDOW_BYTES = 4 << 10

_WINDOW_BYTES = 1 << 20


class Unpickled(NamedTuple):
    """What one pickle of a file gave."""

    #: The object, unchecked; see ``Unpickler.load``.
    value: object
    #: What made it.
    unpickler: Unpickler
    #: First byte of the file after it.
    end: int


def unpickle_at(source: Source, start: int, allowlist: Allowlist, limits: Limits) -> Unpickled:
    """Run the pickle that starts at byte ``start``.

    Raises:
        TruncatedError: The file ends before the pickle does.
        LimitError: It is longer than ``limits.header_bytes``, or does more than the other limits allow.
        CheckpointError: See ``Unpickler.load``.
    """
    if start >= source.identity.nbytes:
        raise TruncatedError("the file ends where a pickle should start", file=source.path, offset=start)
    windows = _Windows(source, start, limits.header_bytes)
    first = windows.read(start, 0)
    unpickler = Unpickler(first, allowlist, limits=limits, file=source.path, offset=start, refill=windows.read)
    value = unpickler.load()
    return Unpickled(value, unpickler, windows.start + unpickler.end)


class _Windows:
    """Reads one pickle window by window."""

    def __init__(self, source: Source, start: int, max_bytes: int) -> None:
        #: First byte of the latest window.
        self.start = start
        self._source = source
        self._size = _FIRST_WINDOW_BYTES
        self._first = start
        self._max_bytes = max_bytes

    def read(self, start: int, known_bytes: int) -> bytes:
        """Return the file from ``start`` on, of which ``known_bytes`` are known already; see ``Refill``."""
        available = self._source.identity.nbytes - start
        allowed = self._first + self._max_bytes - start
        if known_bytes >= allowed:
            raise LimitError(
                "a pickle passes the limit 'header_bytes'",
                file=self._source.path,
                offset=self._first,
                expected=f"at most {self._max_bytes}",
            )
        nbytes = min(max(self._size, 2 * known_bytes), available, allowed)
        self.start = start
        self._size = min(2 * self._size, _WINDOW_BYTES)
        return self._source.read_at(start, nbytes)
