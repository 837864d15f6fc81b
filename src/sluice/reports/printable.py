"""Text from files, made safe for terminals.

Names and values of a checkpoint are untrusted: control characters and escape sequences in them could move the cursor or
change the colours and text that the user sees. Every character that is not printable is replaced by its escape.
"""

from __future__ import annotations

from reprlib import Repr

__all__ = ["printable", "printable_name", "printable_paragraph", "printable_value", "shorten"]

#: Larger integers are shown in hexadecimal: Python refuses to convert very long ones to decimal.
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
    """Return a printable name; the empty name as ``''``, so that it can be seen."""
    return printable(name) or "''"


def printable_paragraph(text: str) -> str:
    """Return ``text`` with every line made printable, and its line breaks."""
    return "\n".join(printable(line) for line in text.split("\n"))


def shorten(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of ``text``; if it is longer, followed by its length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


class _ShortRepr(Repr):
    """A short ``repr`` that cuts large values before it formats them."""

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
