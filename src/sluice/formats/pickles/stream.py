"""Reader of a pickle inside a larger file, whose length is known only after its last opcode.

The start of the file is read, and read on if the pickle has not ended: each time as many bytes again. The bytes read
after the end of a pickle are therefore at most its length, one pickle frame (64 KiB), or 4 KiB.
"""

from __future__ import annotations

from typing import NamedTuple

from sluice._errors import LimitError, TruncatedError
from sluice._options import TEXT_ENCODING, Limits
from sluice.formats.pickles.unpickler import Allowlist, Unpickler
from sluice.sources.protocol import Source

__all__ = ["Unpickled", "unpickle_at"]

_FIRST_BYTES = 4 << 10


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
    file, available = source.path, source.identity.nbytes - start
    if available <= 0:
        raise TruncatedError("the file ends where a pickle should start", file=file, offset=start)
    allowed = min(available, limits.header_bytes)

    def more(known: int) -> bytes:
        if known == allowed < available:
            problem, expected = "a pickle exceeds the limit 'header_bytes'", f"at most {limits.header_bytes}"
            raise LimitError(problem, file=file, offset=start, expected=expected)
        return source.read_at(start + known, min(known, allowed - known))

    first = source.read_at(start, min(_FIRST_BYTES, allowed))
    unpickler = Unpickler(first, allowlist, limits=limits, file=file, offset=start, more=more, encoding=encoding)
    value = unpickler.load()
    return Unpickled(value, unpickler, start + unpickler.end)
