"""Walk an object before it is pickled: collect its tensors in pickle order, and the objects that occur more than once.

The caller decides which values represent tensors: tensors or records. No torch.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
from msgspec import Struct

from sluice._errors import SaveError
from sluice.entries.tree import children, component

__all__ = ["WalkedObject", "elements", "walk_object"]

#: Types whose values contain nothing and are never memoized.
_SCALARS = frozenset({type(None), bool, int, float, complex})


class WalkedObject(Struct, frozen=True):
    """Tensors and repeated values of an object."""

    #: Values that represent tensors, each once, in pickle order.
    tensors: list[Any]
    #: ids of strings, containers and tensors that occur more than once.
    repeated: frozenset[int]
    #: Number of places of the tensors; a container that occurs more than once counts once.
    places: int


def walk_object(
    obj: object, attributes_of: Callable[[Any], Mapping[str, object] | None], *, by_value: bool = False
) -> WalkedObject:
    """Walk an object once, in pickle order.

    Args:
        obj: The object.
        by_value: Whether no string counts as repeated. Which equal strings are one object differs between processes.
        attributes_of: Called with each value that is not a built-in container, number or string. Returns the Python
            attributes of a value that represents a tensor, possibly empty, and None for any other picklable value.

    Raises:
        SaveError: Raised by ``attributes_of`` for a value that cannot be pickled.
    """
    texts = array("Q")
    seen: set[int] = set()
    again = array("Q")
    tensors: list[Any] = []
    waiting: list[Iterator[Any]] = [iter((obj,))]
    while waiting:
        for value in waiting[-1]:
            kind = type(value)
            if kind is str:
                texts.append(id(value))
            elif kind in _SCALARS:
                pass
            elif id(value) in seen:
                again.append(id(value))
            else:
                seen.add(id(value))
                try:
                    inside = _inside(value, attributes_of, tensors)
                except SaveError as error:
                    error.tensor = error.tensor or _place(obj, value)
                    raise
                if inside is not None:
                    waiting.append(inside)
                    break
        else:
            waiting.pop()
    own = set(map(id, tensors)) if again else set()
    places = len(tensors) + sum(address in own for address in again)
    return WalkedObject(tensors, frozenset(again if by_value else {*again, *_twice(texts)}), places)


def elements(value: set[Any]) -> list[Any]:
    """Return the elements of a set in an order independent of hashes; sets with tensors keep theirs."""
    if any(hasattr(element, "shape") for element in value):
        return list(value)
    return sorted(value, key=lambda element: (type(element).__name__, repr(element)))


def _inside(
    value: Any, attributes_of: Callable[[Any], Mapping[str, object] | None], tensors: list[Any]
) -> Iterator[object] | None:
    """Return an iterator over the values inside a value, or None; append a tensor to ``tensors``."""
    kind: type = type(value)
    if kind in (dict, Counter):
        return chain.from_iterable(value.items())
    if kind is OrderedDict:
        return chain(chain.from_iterable(value.items()), (vars(value),) if vars(value) else ())
    if kind in (list, tuple):
        children: Iterator[object] = iter(value)
        return children
    if kind is set:
        return iter(elements(value))
    attributes = attributes_of(value)
    if attributes is None:
        return None
    tensors.append(value)
    return iter((attributes,)) if attributes else None


def _place(obj: object, wanted: object) -> str | None:
    """Return the dotted name of a value in nested dicts, lists and tuples; None for other places."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", obj)]
    while waiting:
        name, value = waiting.pop()
        if value is wanted:
            return name[1:] or None
        if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting += [(f"{name}.{component(key)}", child) for key, child in children(value)]
    return None


def _twice(addresses: array[int]) -> set[int]:
    """Return the numbers that occur more than once in an array, with memory for one copy of it."""
    if not addresses:
        return set()
    ordered = np.sort(np.frombuffer(addresses, dtype=np.uint64))
    return set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
