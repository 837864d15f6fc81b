"""The summary that ``sluice inspect`` shows of a checkpoint: a record, lines and tables, JSON; values as lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite

from msgspec import Struct

from sluice._errors import LimitError
from sluice._messages import first_names, listed
from sluice._options import Limits
from sluice._units import counted, format_bytes
from sluice.entries import tree as trees
from sluice.matching.candidates import likely_state_dicts
from sluice.records import Entry, Index, Opaque, UnsupportedValue
from sluice.reports.document import Grid, Section, Strong, printable, printable_name, printable_value, shorten

__all__ = ["Summary", "children", "describe", "describe_dtype", "is_plain_list", "path_and_key", "summarise", "to_json"]

#: Most JSON readers cannot represent larger integers; they are written as text.
_JSON_INTEGER_BITS = 64

#: Shown without ``--all``: rows of a table, characters of a name and of a metadata text.
_ROWS_SHOWN = 10
_NAME_CHARACTERS = 120
_TEXT_CHARACTERS = 200

#: Shown values at the top of a checkpoint; a training checkpoint has about a dozen.
_VALUES_SHOWN = 20

_ELSEWHERE = "--all shows all"


class Summary(Struct, frozen=True, kw_only=True):
    """Facts about a checkpoint, from its headers."""

    #: Path as given.
    path: str
    #: Dotted path of the requested part; None for the whole checkpoint.
    key: str | None
    #: The index of the whole checkpoint.
    index: Index
    #: Tensors of the part, by dotted name.
    tensors: Mapping[str, Entry]
    #: Number of tensors and their bytes by dtype, the largest first. Names that share bytes count in full.
    dtypes: Mapping[str, tuple[int, int]]
    #: Names that view a storage, in the order of the file, by its position in the index; of those that several view.
    shared: Mapping[int, Sequence[str]]
    #: Values at the top of the part: key, description, number of tensors in it and their bytes, each name in full;
    #: empty if all of them are tensors.
    contents: Sequence[tuple[str, str, int, int]]
    #: Tensors that sluice does not read, by dotted name.
    unsupported: Mapping[str, UnsupportedValue]
    #: Keys of possible state dicts, the largest first; ``""`` is the whole part.
    state_dicts: tuple[str, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors; names that share bytes count in full."""
        return sum(nbytes for _, nbytes in self.dtypes.values())

    @property
    def packed(self) -> bool:
        """Whether elements are stored in packs, in fewer bytes than they have when they are read."""
        return any(entry.elements.packing for entry in self.tensors.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of the storages that the tensors view, each storage once."""
        viewed = {number for entry in self.tensors.values() for number in entry.storages}
        return sum(self.index.storages[number].nbytes for number in viewed)

    def sections(self, *, everything: bool) -> Iterator[Section]:
        """Yield the lines and tables of ``sluice inspect``; with ``everything`` no list is cut."""
        index = self.index
        total = sum(file.identity.nbytes for file in index.files)
        yield Strong(path_and_key(self.path, self.key))
        yield f"{index.format}, {counted(len(index.files), 'file')}, {format_bytes(total)}"
        stored = f", {format_bytes(self.stored_bytes)} stored" if self.shared or self.packed else ""
        yield f"{counted(len(self.tensors), 'tensor')}, {format_bytes(self.tensor_bytes)}{stored}"
        if len(index.files) > 1:
            files = ((file.path, format_bytes(file.identity.nbytes)) for file in index.files)
            yield _cut(("file", ">bytes"), files, len(index.files), None if everything else _ROWS_SHOWN)
        if self.contents:
            yield self._contents(everything=everything)
            yield from self._state_dicts()
        if self.tensors:
            rows = [(dtype, f"{count:,}", format_bytes(nbytes)) for dtype, (count, nbytes) in self.dtypes.items()]
            yield Grid(("dtype", ">tensors", ">bytes"), rows)
        if self.unsupported:
            opaque = ((_name(name), leaf.reason, leaf.qualified_name) for name, leaf in self.unsupported.items())
            headers = ("not loaded", "kind", "in the file")
            yield _cut(headers, opaque, len(self.unsupported), None if everything else _ROWS_SHOWN)
        yield from self._tensors(everything=everything)
        yield from self._shared(everything=everything)
        if index.metadata:
            yield Strong("Metadata")
        for name, text in index.metadata.items():
            yield f"{name}: {text if everything else shorten(text, _TEXT_CHARACTERS)}"
        yield from (f"note: {note}" for note in index.notes)

    def _contents(self, *, everything: bool) -> Grid:
        rows = (
            (shorten(label, _NAME_CHARACTERS), text, f"{tensors:,}", format_bytes(nbytes))
            if tensors
            else (shorten(label, _NAME_CHARACTERS), text, "", "")
            for label, text, tensors, nbytes in self.contents
        )
        headers = ("contents", "", ">tensors", ">bytes")
        return _cut(headers, rows, len(self.contents), None if everything else _VALUES_SHOWN)

    def _state_dicts(self) -> Iterator[str]:
        """Yield the state dict that a load takes without ``key=``, or those to choose from."""
        keys = [_name(f"{self.key}.{key}" if self.key else key) for key in self.state_dicts]
        if len(keys) > 1:
            yield listed("state dicts to choose from with --key", keys)
        elif self.state_dicts and self.state_dicts[0]:
            yield f"state dict: {keys[0]}"

    def _tensors(self, *, everything: bool) -> Iterator[Section]:
        if not self.tensors:
            return
        count, tensors = len(self.tensors), list(self.tensors.items())
        if not everything:
            tensors = sorted(tensors, key=lambda item: -item[1].nbytes)[:_ROWS_SHOWN]
            cut = f" ({_ROWS_SHOWN} of {count:,}; {_ELSEWHERE})" if count > _ROWS_SHOWN else ""
            yield Strong(f"Largest tensors{cut}")
        rows = [
            (_name(name, cut=not everything), describe_dtype(entry), str(list(entry.shape)), format_bytes(entry.nbytes))
            for name, entry in tensors
        ]
        yield Grid(("name", "dtype", "shape", ">bytes"), rows)

    def _shared(self, *, everything: bool) -> Iterator[Section]:
        if not self.shared:
            return
        if not everything:
            yield Strong("Shared storages")
        storages = self.index.storages
        rows = (
            (storages[number].key, format_bytes(storages[number].nbytes), _names(names, everything=everything))
            for number, names in self.shared.items()
        )
        headers = ("storage", ">bytes", "shared by")
        yield _cut(headers, rows, len(self.shared), None if everything else _ROWS_SHOWN)


def path_and_key(path: str, key: str | None) -> str:
    """Return the title of what is shown: a path, and the requested part of it."""
    return f"{path}, {key}" if key else path


def _cut(headers: tuple[str, ...], rows: Iterable[Sequence[str]], total: int, shown: int | None) -> Grid:
    """Return a table of the first ``shown`` rows; None shows all."""
    first = list(islice(rows, shown))
    return Grid(headers, first, total - len(first), elsewhere=_ELSEWHERE)


def _name(name: str, *, cut: bool = True) -> str:
    """Return a name as it is shown: cut, and quoted if it is empty."""
    return (shorten(name, _NAME_CHARACTERS) if cut else name) or "''"


def _names(names: Sequence[str], *, everything: bool) -> str:
    shown = [_name(name, cut=not everything) for name in names]
    return ", ".join(shown) if everything else first_names(shown)


def summarise(path: str, key: str | None, index: Index, tensors: Mapping[str, Entry]) -> Summary:
    """Return the summary of ``tensors``, all or part of the tensors of ``index``."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    viewers: defaultdict[int, list[str]] = defaultdict(list)
    for name, entry in tensors.items():
        packing = entry.elements.packing
        dtype = entry.dtype if packing is None else f"{packing.name} as {entry.dtype}"
        counts[dtype] += 1
        sizes[dtype] += entry.nbytes
        for number in entry.storages:
            viewers[number].append(name)
    return Summary(
        path=path,
        key=key,
        index=index,
        tensors=tensors,
        dtypes={dtype: (counts[dtype], nbytes) for dtype, nbytes in sizes.most_common()},
        shared={n: names for n, names in viewers.items() if len(names) > 1 and index.storages[n].nbytes},
        contents=_top_level(index.tree),
        unsupported={
            name: leaf for name, leaf in trees.opaques(index.tree).items() if isinstance(leaf, UnsupportedValue)
        },
        state_dicts=tuple(likely_state_dicts(index.tree)),
    )


def _top_level(tree: object) -> list[tuple[str, str, int, int]]:
    """Return the values at the top, the largest first; nothing if all of them are tensors."""
    tensors_only = (Entry, UnsupportedValue)
    if not isinstance(tree, (dict, list, tuple)) or all(isinstance(value, tensors_only) for _, value in children(tree)):
        return []
    below = trees.sizes(tree)
    values = []
    for label, value in children(tree):
        size = (1, value.nbytes) if isinstance(value, Entry) else below.get(id(value), (0, 0))
        values.append((label, describe(value), *size))
    return sorted(values, key=lambda each: -each[3])


def to_json(summary: Summary, limits: Limits) -> dict[str, object]:
    """Return everything in the headers, as documented in the help of the command.

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
        "shared": [{"storage": number, "names": names} for number, names in summary.shared.items()],
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
        "packing": entry.elements.packing and entry.elements.packing.name,
        "math_bits": entry.elements.math_bits,
        "shape": entry.shape,
        "stride": entry.stride,
        "nbytes": entry.nbytes,
        "storages": entry.storages,
        "storage_offset": entry.storage_offset,
        "parameter": entry.parameter,
        "requires_grad": entry.requires_grad,
    }


def _values(tree: object, limits: Limits) -> Iterator[dict[str, object]]:
    others = ((name, leaf) for name, leaf in trees.leaves(tree) if not isinstance(leaf, (Entry, UnsupportedValue)))
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


def children(container: Mapping[object, object] | list[object] | tuple[object, ...]) -> Iterator[tuple[str, object]]:
    """Yield the label, safe for terminals, and the value of each child of a container."""
    if isinstance(container, Mapping):
        for key, child in container.items():
            yield printable_name(key) if isinstance(key, str) else printable_value(key), child
    else:
        for number, child in enumerate(container):
            yield f"[{number}]", child


def describe(value: object) -> str:
    """Return a value as one line, safe for terminals; for a container its type and length."""
    if isinstance(value, Entry):
        kind = "Parameter " if value.parameter else "storage " if value.bare else ""
        return f"{kind}{describe_dtype(value)} {list(value.shape)}, {format_bytes(value.nbytes)}"
    if isinstance(value, UnsupportedValue):
        return f"{printable(value.reason)}, {printable(value.qualified_name)} (not loaded)"
    if isinstance(value, Opaque):
        return f"{printable(value.qualified_name)} (not loaded)"
    if isinstance(value, (Mapping, list, tuple)):
        values = f": {printable_value(value)}" if is_plain_list(value) else ""
        return f"{type(value).__name__} of {len(value):,}{values}"
    return printable_value(value)


def describe_dtype(entry: Entry) -> str:
    """Return the dtype of an entry and its other properties: sparse, quantized, packed, conjugated or negated."""
    layout = () if entry.composite is None else (entry.layout,)
    packing = () if entry.elements.packing is None else (entry.elements.packing.name, "as")
    return " ".join((*layout, *packing, *entry.elements.math_bits, entry.dtype))


def is_plain_list(value: object) -> bool:
    """Return whether one line is enough: parameter numbers of an optimizer, betas, a shape."""
    return isinstance(value, (list, tuple)) and not any(
        isinstance(child, (Entry, Opaque, Mapping, list, tuple)) for child in value
    )
