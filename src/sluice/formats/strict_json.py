"""Strict JSON parser, which refuses what Python's ``json`` module accepts beyond the specification."""

from __future__ import annotations

import json
from collections import Counter
from math import isfinite

__all__ = ["kind_of", "parse_strict_json"]


def parse_strict_json(data: bytes) -> object:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: The text is not valid JSON, gives a name twice, contains NaN or an infinity, or begins with a
            byte-order mark.
        RecursionError: It is nested too deeply for the parser.
    """
    return json.loads(data.decode(), object_pairs_hook=_object, parse_float=_finite, parse_constant=_refuse_constant)


def kind_of(value: object) -> str:
    """Return a description of the type of a JSON value, for messages."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError(f"the name {Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is given twice")
    return values


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not valid JSON")
