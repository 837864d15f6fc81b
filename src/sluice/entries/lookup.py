"""Lookup of a key in ``Index.tree``. Pure; nothing recurses, so depth costs no stack."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any

from sluice._errors import MismatchError
from sluice.entries.tree import CONTAINERS, children, component, metadata, walk

__all__ = ["subtree"]

#: Most keys that a message lists.
_SHOWN = 10

#: Most names that are compared with a key that does not exist, and the most characters and components of each.
_COMPARED = 2000
_LONGEST = 1000
_COMPONENTS = 16

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)


def subtree(tree: object, key: str) -> Any:
    """Return the part of the tree that ``key`` names.

    ``key`` is a path into the tree (``"ema.model"``, ``"models.0"``), where keys that contain dots are tried first, or
    such a path followed by a prefix of flat names: ``"model.blocks.0"`` selects the names in ``model`` that start with
    ``blocks.0.``, without that prefix. An empty key is the whole tree.

    Raises:
        MismatchError: The key names nothing; the error lists the top-level keys and similar names.
    """
    reached: dict[tuple[int, int], object] = {}
    states: list[tuple[object, int]] = [(tree, 0 if key else 1)]
    while states:
        value, start = states.pop()
        if start > len(key):
            return value
        if (id(value), start) in reached:
            continue
        reached[id(value), start] = value
        ends = [match.start() for match in re.finditer(r"\.|$", key) if match.start() >= start]
        states += [(child, end + 1) for end in ends for child in _lookup(value, key[start:end])]
    for (_, start), value in reached.items():
        part = _under_prefix(value, f"{key[start:]}.")
        if part:
            return part
    raise _missing_key(tree, key)


def _lookup(value: object, component: str) -> Iterator[object]:
    """Yield the children of a container that one component of a dotted name can mean."""
    number = int(component) if _INTEGER.fullmatch(component) else None
    if isinstance(value, dict):
        if number in value:
            yield value[number]
        if component in value:
            yield value[component]
    elif isinstance(value, (list, tuple)) and number is not None and 0 <= number < len(value):
        yield value[number]


def _under_prefix(value: object, prefix: str) -> Any:
    """Return the items and the module versions whose names start with ``prefix``, without the prefix."""
    if not isinstance(value, dict):
        return None
    part: Any = type(value)()
    for name, child in value.items():
        if isinstance(name, str) and name.startswith(prefix):
            part[name[len(prefix) :]] = child
    versions = metadata(value)
    if isinstance(versions, dict):
        part._metadata = OrderedDict(  # noqa: SLF001 - torch's own name for it
            (name[len(prefix) :], version)
            for name, version in versions.items()
            if isinstance(name, str) and f"{name}.".startswith(prefix)
        )
    return part


def _missing_key(tree: object, key: str) -> MismatchError:
    top = [component(name) for name, _ in islice(children(tree), _SHOWN)] if isinstance(tree, CONTAINERS) else []
    parts = dict.fromkeys(
        name[:end]
        for name, _ in islice(walk(tree), _COMPARED)
        if len(name) <= _LONGEST
        for end in (match.start() for match in islice(re.finditer(r"\.|$", name), _COMPONENTS))
    )
    close = get_close_matches(key, parts, n=3)
    return MismatchError(
        f"the checkpoint has nothing at key {key!r}",
        expected="one of " + ", ".join(map(repr, top)) + (", ..." if len(top) == _SHOWN else "") if top else None,
        found="similar names: " + ", ".join(map(repr, close)) if close else None,
    )
