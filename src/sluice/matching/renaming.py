"""Apply the ``rename`` argument of a load to the names of a checkpoint. Pure; no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sluice._errors import MismatchError

__all__ = ["Rename", "rename_entries", "renamed"]

#: Exact names, (regular expression, replacement) pairs applied in order, or a function; None drops a name.
Rename = Mapping[str, str | None] | Sequence[tuple[str | re.Pattern[str], str]] | Callable[[str], str | None]


_Value = TypeVar("_Value")


def rename_entries(entries: Mapping[str, _Value], rename: Rename | None) -> dict[str, _Value]:
    """Return values by their new names, without the dropped ones.

    Raises:
        MismatchError: Two entries get the same name.
        TypeError: A function returns neither a name nor None.
    """
    if rename is None:
        return dict(entries)
    renamed_entries: dict[str, _Value] = {}
    for name, entry in entries.items():
        new = renamed(name, rename)
        if new is None:
            continue
        if new in renamed_entries:
            raise MismatchError(
                "rename gives two tensors of the checkpoint the same name", tensor=new, found=repr(name)
            )
        renamed_entries[new] = entry
    return renamed_entries


def renamed(name: str, rename: Rename) -> str | None:
    """Return the new name of a name, or None to drop it.

    Raises:
        TypeError: A function returns neither a name nor None.
        ValueError: A replacement names a group that its regular expression does not have.
    """
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    if callable(rename):
        new = rename(name)
        if new is not None and not isinstance(new, str):
            raise TypeError(f"rename must return a name or None, not {type(new).__name__}")
        return new
    for pattern, replacement in rename:
        try:
            name = re.sub(pattern, replacement, name)
        except (re.error, IndexError) as error:
            text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
            raise ValueError(f"rename=: the replacement {replacement!r} does not fit {text!r}: {error}") from None
    return name
