"""Split iterables into batches, as ``itertools.batched`` of Python 3.12 does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

__all__ = ["batched"]

_Item = TypeVar("_Item")


def batched(items: Iterable[_Item], count: int) -> Iterator[list[_Item]]:
    """Yield the items in lists of ``count``; the last list may be shorter.

    Example:
        >>> list(batched("abcde", 2))
        [['a', 'b'], ['c', 'd'], ['e']]
    """
    remaining = iter(items)
    while batch := list(islice(remaining, count)):
        yield batch
