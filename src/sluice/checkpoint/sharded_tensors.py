"""State dicts of FSDP1's ranks, in one file each, joined: ``StateDictType.SHARDED_STATE_DICT`` saved by every rank.

Every file has the same object: its shards of divided tensors (``formats.torch_save.sharded``), and all of the others,
of which those of the first file count. Shards with the same place are copies, as hybrid sharding writes them.

Flat parameters (``LOCAL_STATE_DICT``, ``_flat_param``) are joined too, but stay vectors, with a note: the files tell
neither the names nor the shapes of the tensors in them. With ``use_orig_params``, pieces of the tensors are next to
them, whose shapes are not told either: ``UnsupportedValue`` leaves.

Limits: ``Limits.entries`` for the corners of all shards together.
Refused: shards that overlap or leave a gap; files that disagree on the size or dtype of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from sluice._errors import FormatError, IncompleteCheckpointError, LimitError
from sluice._messages import listed
from sluice._options import Limits
from sluice.entries import tree as trees
from sluice.entries.slicing import cut_dimensions, first_miscount
from sluice.formats.torch_save.sharded import local_shards
from sluice.records import NO_STORAGE, Entry, Index, Part, UnsupportedValue, row_major
from sluice.records.geometry import contiguous_stride

__all__ = ["RankFile", "has_shards", "join_shards", "joined_tree"]

_ALL_RANKS = "The other shards are in the files of other ranks: pass all of them as a list."
_FLAT = "_flat_param"
_VECTORS = "Flat parameters of FSDP1, vectors: the files do not tell the names and shapes of the tensors in them"
_PIECE = "a piece of a flat parameter of FSDP1, of whose shape the files do not tell"
_OTHER_KINDS = "Save it with SHARDED_STATE_DICT or FULL_STATE_DICT."


class RankFile(NamedTuple):
    """The file of one rank."""

    #: Its path, for messages.
    path: str
    #: Its tensors and values by name, with the storages of all files.
    values: Mapping[str, object]


class _Shard(NamedTuple):
    entry: Entry
    start: tuple[int, ...]
    path: str


def has_shards(index: Index) -> bool:
    """Return whether the file of an index has a part of a divided tensor."""
    return index.format.startswith("torch-") and any(
        local_shards(leaf) is not None for leaf in trees.unsupported(index.tree).values()
    )


def join_shards(files: Sequence[RankFile], limits: Limits) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the tensors and values of the files by name, and notes.

    Raises:
        IncompleteCheckpointError: The shards of a tensor leave a gap.
        FormatError: Files contradict each other.
        LimitError: There are more corners of shards than the limits allow.
    """
    names = dict.fromkeys(chain.from_iterable(file.values for file in files))
    for name in names:
        if name not in files[0].values:
            raise FormatError("a file lacks a name that the files of other ranks have", file=files[0].path, tensor=name)
    flat = [name for name in names if name.rpartition(".")[2] == _FLAT]
    tree: dict[str, object] = {}
    corners_left, joined = limits.entries, 0
    for name in names:
        having = [file for file in files if name in file.values]
        values = [file.values[name] for file in having]
        shapes = {value.shape for value in values if isinstance(value, Entry)}
        if flat and len(shapes) > 1 and all(len(shape) == 1 for shape in shapes):
            path = having[0].path
            tree[name] = UnsupportedValue(qualified_name="torch.Tensor", reason=_PIECE, file=path, advice=_OTHER_KINDS)
            continue
        size, chunks = _shards(name, having)
        if size is None:
            tree[name] = values[0]
            continue
        boxes = [(chunk.start, chunk.entry.shape) for chunk in chunks]
        corners_left -= len(boxes) << len(cut_dimensions(size, boxes))
        if corners_left < 0:
            problem = "the shards of all tensors have more corners than the limit 'entries'"
            raise LimitError(problem, file=having[0].path, tensor=name, expected=f"at most {limits.entries}")
        tree[name] = _assembled(name, size, chunks)
        joined += 1
    notes = [f"Tensors that are joined from the shards of {len(files)} files: {joined}."]
    return tree, (*notes, *([f"{listed(_VECTORS, flat)}."] if flat else ()))


def joined_tree(first: object, joined: Mapping[str, object]) -> object:
    """Return the object of the first file with the joined tensors in place of its own."""
    made = {id(leaf): joined[name] for name, leaf in trees.leaves(first) if isinstance(leaf, (Entry, UnsupportedValue))}
    return trees.map_leaves(first, lambda entry: entry, plain=lambda value: made.get(id(value), value))


def _shards(name: str, files: Sequence[RankFile]) -> tuple[tuple[int, ...] | None, list[_Shard]]:
    """Return the size and the shards of a divided tensor; None for anything else, which the files must agree on."""
    size: tuple[int, ...] | None = None
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], _Shard] = {}
    kinds: dict[object, str] = {}
    divided = any(local_shards(values[name]) is not None for _, values in files)
    for path, values in files:
        value = values[name]
        found = local_shards(value)
        if divided and isinstance(value, Entry) and value.composite is None:  # all of it is on this rank
            found = value.shape, [((0,) * len(value.shape), value)]
        if found is None:
            kinds.setdefault((value.dtype, value.shape) if isinstance(value, Entry) else type(value), path)
            continue
        size = found[0]
        kinds.setdefault(size, path)
        for start, entry in found[1]:
            if entry.numel or 0 in size:
                chunks.setdefault((start, entry.shape), _Shard(entry, start, path))
    dtypes = {chunk.entry.dtype: chunk.path for chunk in chunks.values()}
    for described in (kinds, dtypes):
        if len(described) > 1:
            (first, _), (other, path), *_ = described.items()
            problem = "the files of ranks disagree on the size or dtype of a tensor"
            raise FormatError(problem, file=path, tensor=name, expected=_text(first), found=_text(other))
    if size is not None and not chunks:
        raise FormatError("no file has a shard of a tensor", file=files[0].path, tensor=name, advice=_ALL_RANKS)
    return size, list(chunks.values())


def _assembled(name: str, size: tuple[int, ...], shards: Sequence[_Shard]) -> Entry:
    first = shards[0]
    if len(shards) == 1 and first.entry.shape == size:
        return first.entry
    if 0 in size:
        return replace(first.entry, shape=size, stride=contiguous_stride(size))
    miscount = first_miscount(size, [(shard.start, shard.entry.shape) for shard in shards])
    if miscount is not None:
        element, boxes = miscount
        kind, how = (FormatError, "overlap") if boxes else (IncompleteCheckpointError, "leave a gap")
        found = f"element {list(element)} in {boxes} of {len(shards)} shards"
        problem, advice = f"the shards of a tensor {how}", None if boxes else _ALL_RANKS
        raise kind(problem, file=first.path, tensor=name, expected="in one", found=found, advice=advice)
    parts = tuple(Part(entry=shard.entry, start=shard.start) for shard in shards)
    whole = row_major(first.entry.dtype, size, NO_STORAGE, parts)
    return replace(whole, requires_grad=first.entry.requires_grad)


def _text(description: object) -> str:
    return str(getattr(description, "__name__", description))
