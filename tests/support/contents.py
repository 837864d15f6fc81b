"""Read a checkpoint once per content: loops over faults see the same bytes many times."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias, TypeVar

T = TypeVar("T")

#: Digest of each file by its path below the checkpoint.
_Contents: TypeAlias = frozenset[tuple[str, bytes]]


def _contents(path: Path) -> _Contents:
    """Return digests of a checkpoint's files, hidden ones included; a link to a checkpoint is followed."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return frozenset((str(each.relative_to(path)), blake2b(each.read_bytes()).digest()) for each in files)


def once_per_content(read: Callable[[Path], T]) -> Callable[[Path], T]:
    """Return ``read`` with a cache: files with the same names and bytes are read once, unless reading fails."""
    known: dict[tuple[str, _Contents], T] = {}

    def remembered(path: Path) -> T:
        key = path.name, _contents(path)
        if key not in known:
            known[key] = read(path)
        return known[key]

    return remembered
