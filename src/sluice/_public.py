"""The module that public names report as theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["public"]

_Thing = TypeVar("_Thing")


def public(module: str = "sluice") -> Callable[[_Thing], _Thing]:
    """Return a decorator that sets ``__module__`` of a class or function to the module that exports it.

    Tracebacks, ``repr`` and pickles then name ``sluice.FormatError``, and later moves inside the package do not show.
    ``typing.get_type_hints`` of such a class needs ``globalns``, as for numpy's and torch's classes.
    """

    def mark(thing: _Thing) -> _Thing:
        thing.__module__ = module
        return thing

    return mark
