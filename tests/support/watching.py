"""Calls of a function, seen on their way to it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import pytest


def watch(patch: pytest.MonkeyPatch, owner: object, name: str, note: Callable[..., object]) -> None:
    """Call ``note`` with the arguments of each call of a function, and then the function; ``note`` may raise instead.

    Args:
        patch: Ends it.
        owner: The module, class or object that has the function.
        name: The name of the function.
        note: What sees the arguments.
    """
    usual = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        note(*arguments, **options)
        return usual(*arguments, **options)

    patch.setattr(owner, name, call)


def raising(number: int, error: BaseException) -> Callable[..., None]:
    """Return a function whose call of this number, counted from 1, raises an error."""
    results = chain(repeat(None, number - 1), [error], repeat(None))

    def call(*_: object, **__: object) -> None:
        if (result := next(results)) is not None:
            raise result

    return call
