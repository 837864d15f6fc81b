"""Errors about a file are those of sluice, and ``SafetensorError`` as well, which callers of safetensors catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from safetensors import SafetensorError

from sluice._errors import CheckpointError

__all__ = ["SafetensorError", "as_safetensors"]


@cache
def _both(kind: type[CheckpointError]) -> type[CheckpointError]:
    return type(kind.__name__, (kind, SafetensorError), {"__module__": kind.__module__, "__doc__": kind.__doc__})


@contextmanager
def as_safetensors() -> Iterator[None]:
    """Let errors about a file also be a ``SafetensorError``."""
    try:
        yield
    except CheckpointError as error:
        if not isinstance(error, SafetensorError):
            error.__class__ = _both(type(error))  # type: ignore[arg-type]  # a class is hashable
        raise
