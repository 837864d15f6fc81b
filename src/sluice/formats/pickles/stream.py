"""Reader of a pickle inside a larger file, whose length is known only after its last opcode.

The file is read in windows on demand: 4 KiB first, then each window twice the last, up to 1 MiB. The bytes read after
the end of a pickle are therefore at most its length plus one pickle frame (64 KiB), and never more than 1 MiB; at most
one window is in memory. Only text or bytes longer than a window enlarge it.
"""

from __future__ import annotations

from typing import NamedTuple

from sluice._errors import LimitError, TruncatedError
from sluice._options import TEXT_ENCODING, Limits
from sluice.formats.pickles.unpickler import Allowlist, Unpickler
from sluice.sources.protocol import Source

__all__ = ["Unpickled", "unpickle_at"]

_FIRST_WINDOW_BYTES = 4 << 10

_WINDOW_BYTES = 1 << 20


class Unpickled(NamedTuple):
    """The result of one pickle in a file."""

    #: The object, unchecked; see ``Unpickler.load``.
    value: object
    #: The unpickler that built it.
    unpickler: Unpickler
    #: Offset in the file of the first byte after the pickle.
    end: int


def unpickle_at(
    source: Source, start: int, allowlist: Allowlist, limits: Limits, *, encoding: str = TEXT_ENCODING
) -> Unpickled:
    """Run the pickle that starts at byte ``start`` of the file; see ``Unpickler`` for the encoding.

    Raises:
        TruncatedError: The file ends before the pickle does.
        LimitError: The pickle is longer than ``limits.header_bytes`` or exceeds another limit.
        CheckpointError: See ``Unpickler.load``.
    """
    if start >= source.identity.nbytes:
        raise TruncatedError("the file ends where a pickle should start", file=source.path, offset=start)
    windows = _Windows(source, start, limits.header_bytes)
    first = windows.read(start, 0)
    unpickler = Unpickler(
        first, allowlist, limits=limits, file=source.path, offset=start, refill=windows.read, encoding=encoding
    )
    value = unpickler.load()
    return Unpickled(value, unpickler, windows.start + unpickler.end)


class _Windows:
    """Windows of one pickle."""

    def __init__(self, source: Source, start: int, max_bytes: int) -> None:
        #: Offset of the latest window in the file.
        self.start = start
        self._source = source
        self._size = _FIRST_WINDOW_BYTES
        self._first = start
        self._max_bytes = max_bytes

    def read(self, start: int, known_bytes: int) -> bytes:
        """Read the window at ``start``, of which the unpickler already has ``known_bytes``; see ``Refill``."""
        available = self._source.identity.nbytes - start
        allowed = self._first + self._max_bytes - start
        if known_bytes >= allowed:
            raise LimitError(
                "a pickle exceeds the limit 'header_bytes'",
                file=self._source.path,
                offset=self._first,
                expected=f"at most {self._max_bytes}",
            )
        nbytes = min(max(self._size, 2 * known_bytes), available, allowed)
        self.start = start
        self._size = min(2 * self._size, _WINDOW_BYTES)
        return self._source.read_at(start, nbytes)
