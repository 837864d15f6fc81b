"""What ``sluice inspect`` says of a checkpoint, as a record and as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite

from sluice._errors import LimitError
from sluice._options import Limits
from sluice.cli.text import printable_value
from sluice.cli.views.outline import children, describe
from sluice.entries import tree as _tree
from sluice.matching.candidates import likely_state_dicts
from sluice.records import Entry, Index, Opaque, UnsupportedValue

__all__ = ["SharedStorage", "Summary", "summarise", "to_json"]

#: Integers beyond this are no JSON numbers for most readers; they are written as text.
_JSON_INTEGER_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStorage:
    """Bytes of a file that more than one name views."""

    #: Position in ``Index.storages``.
    storage: int
    #: The names, in the order of the file.
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Something at the top of a checkpoint."""

    #: Its key, safe for terminals.
    label: str
    #: One line on what it is, safe for terminals.
    text: str
    #: Tensors in it, each name in full.
    tensors: int
    #: Their bytes.
    nbytes: int


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
    #: What stands at the top of the part; empty where that is tensors and nothing else.
    contents: tuple[Content, ...]
    #: What sluice does not read, by dotted name.
    unsupported: Mapping[str, UnsupportedValue]
    #: Keys of what could be the state dict of a model, the largest first; ``""`` is the whole part.
    state_dicts: tuple[str, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors; a name counts in full, also when it shares its bytes."""
        return sum(nbytes for _, nbytes in self.dtypes.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of the storages that the tensors view, each storage once."""
        viewed = {number for entry in self.tensors.values() for number in entry.storages}
        return sum(self.index.storages[number].nbytes for number in viewed)

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
        for number in entry.storages:
            viewers[number].append(name)
    return Summary(
        path=path,
        key=key,
        index=index,
        tensors=tensors,
        dtypes={dtype: (counts[dtype], nbytes) for dtype, nbytes in sizes.most_common()},
        shared=tuple(
            SharedStorage(storage=number, names=tuple(names))
            for number, names in viewers.items()
            if len(names) > 1 and index.storages[number].nbytes
        ),
        contents=tuple(_contents(index.tree)),
        unsupported={
            name: leaf for name, leaf in _tree.opaques(index.tree).items() if isinstance(leaf, UnsupportedValue)
        },
        state_dicts=tuple(likely_state_dicts(index.tree)),
    )


def _contents(tree: object) -> Iterator[Content]:
    """Yield what stands at the top, the largest first, unless that is tensors only."""
    tensors_only = (Entry, UnsupportedValue)
    if not isinstance(tree, (dict, list, tuple)) or all(isinstance(value, tensors_only) for _, value in children(tree)):
        return
    below = _tree.sizes(tree)
    found = []
    for label, value in children(tree):
        tensors, nbytes = (1, value.nbytes) if isinstance(value, Entry) else below.get(id(value), (0, 0))
        found.append(Content(label=label, text=describe(value), tensors=tensors, nbytes=nbytes))
    yield from sorted(found, key=lambda content: -content.nbytes)


def to_json(summary: Summary, limits: Limits) -> dict[str, object]:
    """Return everything that the headers say, as the help of the command documents it.

    Raises:
        LimitError: There are more values than ``limits.entries``.
    """
    index = summary.index
    return {
        "path": summary.path,
        "key": summary.key,
        "format": index.format,
        "files": [{"path": file.path, "nbytes": file.identity.nbytes} for file in index.files],
        "metadata": dict(index.metadata),
        "tensor_bytes": summary.tensor_bytes,
        "stored_bytes": summary.stored_bytes,
        "dtypes": {dtype: {"count": count, "nbytes": nbytes} for dtype, (count, nbytes) in summary.dtypes.items()},
        "tensors": [_tensor(name, entry) for name, entry in summary.tensors.items()],
        "storages": [{"key": each.key, "file": each.file, "nbytes": each.nbytes} for each in index.storages],
        "state_dicts": summary.state_dicts,
        "shared": [{"storage": shared.storage, "names": shared.names} for shared in summary.shared],
        "unsupported": [
            {"name": name, "reason": leaf.reason, "found": leaf.qualified_name, "file": leaf.file}
            for name, leaf in summary.unsupported.items()
        ],
        "values": list(_values(index.tree, limits)),
        "notes": index.notes,
    }


def _tensor(name: str, entry: Entry) -> dict[str, object]:
    return {
        "name": name,
        "dtype": entry.dtype,
        "layout": entry.layout,
        "math_bits": entry.math_bits,
        "shape": entry.shape,
        "stride": entry.stride,
        "nbytes": entry.nbytes,
        "storages": entry.storages,
        "storage_offset": entry.storage_offset,
        "parameter": entry.parameter,
        "requires_grad": entry.requires_grad,
    }


def _values(tree: object, limits: Limits) -> Iterator[dict[str, object]]:
    others = ((name, leaf) for name, leaf in _tree.leaves(tree) if not isinstance(leaf, (Entry, UnsupportedValue)))
    for number, (name, leaf) in enumerate(others):
        if number == limits.entries:  # a small file can hold one value at millions of places
            raise LimitError("the checkpoint has too many values", expected=f"at most {limits.entries} (entries)")
        yield {"name": name, **_value(leaf)}


def _value(value: object) -> dict[str, object]:
    if isinstance(value, Opaque):
        return {"not_loaded": value.qualified_name}
    exact = (
        value is None
        or isinstance(value, (bool, str))
        or (isinstance(value, int) and value.bit_length() < _JSON_INTEGER_BITS)
        or (isinstance(value, float) and isfinite(value))
    )
    return {"value": value} if exact else {"text": printable_value(value)}
