"""JSON as its specification has it, where Python's own parser is more generous than anybody who writes a file."""

from __future__ import annotations

import json
from collections import Counter
from math import isfinite

__all__ = ["kind_of", "parse_strict_json"]


def parse_strict_json(data: bytes) -> object:
    """Return what JSON text in UTF-8 says.

    Raises:
        ValueError: It is no JSON, gives a name twice, holds NaN or an infinity, or begins with a byte-order mark.
        RecursionError: It nests too deep for the parser.
    """
    return json.loads(data.decode(), object_pairs_hook=_object, parse_float=_finite, parse_constant=_refuse_constant)


def kind_of(value: object) -> str:
    """Return what a JSON value is, in words."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"the name {Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is given twice")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON")
