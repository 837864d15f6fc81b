"""Text from files made safe for terminals.

Names and values of a checkpoint are a stranger's: control characters and escape sequences in them could move the
cursor, recolour or rename what the user sees. Whatever is not printable is shown as an escape.
"""

from __future__ import annotations

from reprlib import Repr

__all__ = ["path_and_key", "printable", "printable_name", "printable_paragraph", "printable_value", "shorten"]

#: Integers beyond this are shown in hexadecimal: Python refuses to write very long ones in decimal.
_DECIMAL_BITS = 256


def printable(text: str) -> str:
    r"""Return ``text`` with every character that is not printable replaced by its escape.

    Example:
        >>> printable("w\x1b[31m")
        'w\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def printable_name(name: str) -> str:
    """Return a name like ``printable``; the empty one in quotes, or nothing would be seen of it."""
    return printable(name) or "''"


def printable_paragraph(text: str) -> str:
    """Return ``text`` like ``printable``, with its line breaks kept."""
    return "\n".join(printable(line) for line in text.split("\n"))


def path_and_key(path: str, key: str | None) -> str:
    """Return the heading of what is shown: a path, and the part of it that was asked for."""
    return printable(f"{path}, {key}" if key else path)


def shorten(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of ``text``, and how many there are when that cuts it."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


class _ShortRepr(Repr):
    """``repr`` that stays short, and cheap for large values: they are cut before they are formatted."""

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002  the signature is that of reprlib
        text = repr(x) if x.bit_length() <= _DECIMAL_BITS else hex(x)
        return text if len(text) <= self.maxother else f"{text[: self.maxother]}... ({x.bit_length()} bits)"

    def repr_bytes(self, x: bytes, level: int) -> str:  # noqa: ARG002  the signature is that of reprlib
        return repr(x[: self.maxother]) + (f"... ({len(x)} bytes)" if len(x) > self.maxother else "")


_SHORT = _ShortRepr()
_SHORT.maxstring = 80
_SHORT.maxother = 80


def printable_value(value: object) -> str:
    """Return a short ``repr`` of a plain value of a checkpoint, safe for terminals."""
    return printable(_SHORT.repr(value))
