"""Calls of a function, seen on their way to it."""

from __future__ import annotations

from collections.abc import Callable
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
