"""Sizes, rates and counts as text, and sizes from text: ``"64MiB"``. Text sizes exist only at the edge of the API."""

from __future__ import annotations

import re
from functools import lru_cache
from numbers import Integral

__all__ = ["counted", "format_bytes", "format_rate", "gb_per_second", "parse_bytes"]

#: Only ``KB`` to ``TB`` are decimal. A single letter is binary, as in ``ulimit``, ``docker run --memory`` and systemd.
_FACTORS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}{end}": 1024**power for power, letter in enumerate("KMGT", 1) for end in ("", "I", "IB")},
}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d+)?)\s*([A-Za-z]*)\s*")

#: Accepted sizes, for error texts.
_FORMS = "2GiB or 2G (2 * 1024**3 bytes), 2GB (2 * 1000**3 bytes), 512MiB, or a number of bytes"


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes from an int or a text such as ``"64MiB"``, ``"2GB"`` or ``"1.5 GiB"``.

    ``GiB``, ``Gi`` and ``G`` are 1024**3 bytes, ``GB`` is 1000**3 bytes; case does not matter.

    Raises:
        ValueError: The text is not a size, or the size is negative.
        TypeError: ``size`` is neither an int nor a str.
    """
    if isinstance(size, str):
        return _parse_text(size)
    if isinstance(size, bool) or not isinstance(size, Integral):
        raise TypeError(f"a size is an int or a text, not {type(size).__name__}; write {_FORMS}")
    if size < 0:
        raise ValueError(f"a size must not be negative: {size}")
    return int(size)


@lru_cache(maxsize=64)
def _parse_text(size: str) -> int:
    match = _SIZE.fullmatch(size)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not a size: {size!r}; write {_FORMS}")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_bytes(nbytes: float) -> str:
    """Return ``nbytes`` with a binary unit and three significant figures: ``"1.50 GiB"``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    if unit == "B":
        return f"{int(value)} B"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: ``"1 tensor"``, ``"2,000 tensors"``."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def gb_per_second(nbytes: int, seconds: float) -> float:
    """Return a rate in units of 10**9 bytes per second; 0.0 if no time was measured."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


def format_rate(nbytes: int, seconds: float) -> str:
    """Return a duration and the rate at which ``nbytes`` were moved in it: ``"0.50 s, 2.10 GB/s"``."""
    return f"{seconds:.2f} s, {gb_per_second(nbytes, seconds):.2f} GB/s"
