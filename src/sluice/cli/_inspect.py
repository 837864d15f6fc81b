"""``sluice inspect``: what a checkpoint holds, from its headers alone. This path never imports torch."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite

import click

import sluice
from sluice._records import Entry, Index, Opaque
from sluice._tree import flatten
from sluice.cli._text import printable_value

__all__ = ["SharedStorage", "Summary", "inspect_command", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStorage:
    """Bytes of a file that more than one name views."""

    #: Position in ``Index.storages``.
    storage: int
    #: The names, in the order of the file.
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What ``sluice inspect`` says of a checkpoint."""

    #: Path as it was given.
    path: str
    #: Part that was asked for, as a dotted path; None is the whole.
    key: str | None
    #: The index of the whole checkpoint.
    index: Index
    #: The tensors of the part, by dotted name.
    tensors: Mapping[str, Entry]
    #: Tensors and bytes of each dtype, the largest first. A name counts in full, also when it shares its bytes.
    dtypes: Mapping[str, tuple[int, int]]
    #: Storages that several of the names view.
    shared: tuple[SharedStorage, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors; a name counts in full, also when it shares its bytes."""
        return sum(nbytes for _, nbytes in self.dtypes.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of the storages that the tensors view, each storage once."""
        return sum(self.index.storages[number].nbytes for number in {entry.storage for entry in self.tensors.values()})

    def largest(self, count: int) -> list[tuple[str, Entry]]:
        """Return the ``count`` largest tensors, the largest first."""
        return sorted(self.tensors.items(), key=lambda item: -item[1].nbytes)[:count]


def summarise(path: str, key: str | None, index: Index, tensors: Mapping[str, Entry]) -> Summary:
    """Return the summary of ``tensors``, which are all or part of ``index``."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    viewers: defaultdict[int, list[str]] = defaultdict(list)
    for name, entry in tensors.items():
        counts[entry.dtype] += 1
        sizes[entry.dtype] += entry.nbytes
        viewers[entry.storage].append(name)
    return Summary(
        path=path,
        key=key,
        index=index,
        tensors=tensors,
        dtypes={dtype: (counts[dtype], nbytes) for dtype, nbytes in sizes.most_common()},
        shared=tuple(
            SharedStorage(storage=number, names=tuple(names)) for number, names in viewers.items() if len(names) > 1
        ),
    )
