"""JSON decoded into typed values, strictly: what readers of JSON disagree on is refused.

msgspec refuses NaN, infinities, lone surrogates, invalid UTF-8, byte-order marks and trailing text, and builds nothing
but the declared types; other members are skipped. It keeps the last of several members with one name, so
``count_strings`` tells how many strings a text holds: more than its values account for, and a name was given twice.
"""

from __future__ import annotations

import re
import threading
from functools import cache
from typing import Any, TypeVar

import msgspec

from sluice._errors import FormatError

__all__ = ["count_strings", "decode_json", "has_longer_list", "without_strings"]

Decoded = TypeVar("Decoded")

#: A string; an unterminated one runs to the end of the text, so that no byte is examined twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)

#: Held while msgspec 0.22 looks at the fields of a struct: two threads that do so at once end the process. Structs that
#: are decoded elsewhere have decoders that are made when their module is imported.
_lock = threading.Lock()
_decoder: Any = cache(msgspec.json.Decoder)


def decode_json(data: bytes, kind: type[Decoded], what: str, file: str) -> Decoded:
    """Return the value of a JSON text.

    Args:
        data: The text in UTF-8.
        kind: Its type, as ``msgspec.json.decode`` takes it.
        what: Its name for messages: ``"the index"``.
        file: Path of the file, for messages.

    Raises:
        FormatError: The text is not valid JSON, or its value has another type.
    """
    try:
        if not data.isascii():
            data.decode()  # msgspec does not decode the members that it skips
        with _lock:
            decoder: msgspec.json.Decoder[Decoded] = _decoder(kind)
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not strict JSON of the expected types: {error}", file=file) from error


def count_strings(data: bytes) -> int:
    """Return the number of strings in a JSON text, names included."""
    return _STRING.subn(b"", data)[1] if b"\\" in data else data.count(b'"') // 2


def without_strings(data: bytes) -> bytes:
    """Return the structure of a JSON text: all of it but its strings."""
    return _STRING.sub(b"", data)


def has_longer_list(data: bytes, most: int) -> bool:
    """Return whether a list of numbers in a JSON text has more than ``most`` items, before any is decoded."""
    pattern = rb"\[(?:[^\[\],]*+,){%d}" % most  # an item with a bracket would take quadratic time
    return re.search(pattern, data) is not None and re.search(pattern, without_strings(data)) is not None
