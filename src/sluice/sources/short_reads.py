"""The error for a range that goes beyond the end of its source."""

from __future__ import annotations

from sluice._errors import TruncatedError

__all__ = ["too_early"]


def too_early(file: str, offset: int, nbytes: int, found: int) -> TruncatedError:
    """Return the error for a read that the file cannot satisfy.

    Args:
        file: Path or address of the file.
        offset: First byte of the read.
        nbytes: Bytes of the read.
        found: Bytes of it that are inside the file; negative numbers count as 0.
    """
    return TruncatedError(
        "the file ends too early",
        file=file,
        offset=offset,
        expected=f"{nbytes} bytes",
        found=f"{max(0, found)} bytes",
    )
