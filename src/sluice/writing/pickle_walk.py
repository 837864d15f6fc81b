"""What an object to be pickled holds: its tensors in the order of the pickle, and what stands in it more than once.

What stands for a tensor, a tensor or a record, is up to the caller. No torch.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

__all__ = ["WalkedObject", "elements", "walk_object"]

#: Values without an identity that matters, and with nothing inside.
_SCALARS = frozenset({type(None), bool, int, float, complex})


@dataclass(frozen=True, slots=True)
class WalkedObject:
    """What is known of an object before it is pickled."""

    #: What stands for tensors, each once, in the order in which the pickle comes to them.
    tensors: list[Any]
    #: Identities of what stands at several places: texts, containers, tensors.
    repeated: frozenset[int]


def walk_object(obj: object, look: Callable[[Any], Mapping[str, object] | None]) -> WalkedObject:
    """Walk an object once, in the order in which it is pickled.

    Args:
        obj: The object.
        look: Called with what is neither a builtin container nor a number or text. It returns the Python attributes of
            what stands for a tensor, empty where it has none, and None for another value that can be pickled.

    Raises:
        SaveError: From ``look``, for what cannot be pickled.
    """
    texts = array("Q")
    seen: set[int] = set()
    repeated: set[int] = set()
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
                repeated.add(id(value))
            else:
                seen.add(id(value))
                inside = _inside(value, look, tensors)
                if inside is not None:
                    waiting.append(inside)
                    break
        else:
            waiting.pop()
    return WalkedObject(tensors, frozenset(repeated | _twice(texts)))


def elements(value: set[Any]) -> list[Any]:
    """Return the elements of a set in an order that no hash decides, unless there are tensors among them."""
    if any(hasattr(element, "shape") for element in value):
        return list(value)
    return sorted(value, key=lambda element: (type(element).__name__, repr(element)))


def _inside(
    value: Any, look: Callable[[Any], Mapping[str, object] | None], tensors: list[Any]
) -> Iterator[object] | None:
    """Return what a value holds, or None for nothing; a tensor is noted."""
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
    attributes = look(value)
    if attributes is None:
        return None
    tensors.append(value)
    return iter((attributes,)) if attributes else None


def _twice(addresses: array[int]) -> set[int]:
    """Return the numbers that stand in an array more than once, with memory for a copy of it and no more."""
    if not addresses:
        return set()
    ordered = np.sort(np.frombuffer(addresses, dtype=np.uint64))
    return set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
