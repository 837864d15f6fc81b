"""Merge the files of a directory into one checkpoint: one tree, one list of storages, and all contradictions.

The tree of several files is one flat dict: their state dicts in order, or one tensor per file under the name of the
file. Storages are numbered across files, in order. Apart from the merged index, only the storages of each file are
kept, which ``Locator.locate`` needs; they are records of the merged index.

The place of every tensor must agree with the index file. Tensors that the index file omits and a wrong total size are
notes: writers produce both, and no data is lost. Further names of an indexed tensor are not omissions: the index names
what is stored.

Several names of one file in a directory of parameters are names of one tensor if the writer declared them
(``declarations``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from msgspec.structs import replace

from sluice._errors import CheckpointError, FormatError, IncompleteCheckpointError
from sluice._messages import SHOWN, listed, section
from sluice._options import Limits
from sluice.checkpoint.declarations import Declaration, find_ties, one_file, without_places
from sluice.checkpoint.open_file import PARAMETER_SUFFIX, PLACES, CheckpointLayout, OpenFile
from sluice.checkpoint.rank_directories import RANK_FILES, rank_tensors
from sluice.checkpoint.sharded_tensors import RankFile, has_shards, join_shards, joined_tree
from sluice.entries import tree as trees
from sluice.formats.shard_index import ShardIndex
from sluice.records import NO_STORAGE, Entry, Index, Opaque, Sparse, UnsupportedValue

__all__ = ["incomplete", "merge", "moved", "renumbered"]

# Section titles of the error that lists all problems.
_MISSING = "missing files"
_DAMAGED = "damaged"
_MISPLACED = "not in the shard that the index names"
_REPEATED = "in two files"
_TIED = "tied to different tensors"
_UNUSABLE = "of a different kind"


class _Problems(defaultdict[str, list[str]]):
    """The lines of each section of the error."""

    def __init__(self) -> None:
        super().__init__(list)

    def error(self, path: str) -> CheckpointError:
        sections = [section(title, lines[:SHOWN], lines) for title, lines in self.items()]
        text = "\n".join(["the files of the checkpoint contradict each other", *sections, "Nothing was read"])
        return IncompleteCheckpointError(text, file=path) if _MISSING in self else FormatError(text, file=path)


def incomplete(layout: CheckpointLayout, missing: Iterable[int], *, damaged: str | None = None) -> CheckpointError:
    """Return the error for missing files, and for a damaged one, which prevented a comparison of the others."""
    problems = _Problems()
    _add_missing(problems, layout, [layout.files[position] for position in sorted(missing)])
    if damaged is not None:
        problems[_DAMAGED].append(damaged)
    return problems.error(layout.path)


def merge(
    layout: CheckpointLayout, opened: Sequence[OpenFile | None], limits: Limits
) -> tuple[Index, tuple[OpenFile, ...]]:
    """Return the merged index of a checkpoint, and its files.

    Args:
        layout: The files and how they relate.
        opened: The open files, in the order of the layout; None for missing files.
        limits: Bounds on names.

    Raises:
        IncompleteCheckpointError: Files are missing.
        FormatError: The files contradict each other, the index file or the layout. Both errors list all problems.
        UnsupportedError: A file holds chunks of tensors.
        LimitError: The files have too many names.
    """
    found = {name: file for name, file in zip(layout.files, opened, strict=True) if file is not None}
    problems = _Problems()
    _add_missing(problems, layout, [name for name in layout.files if name not in found])
    if layout.kind == "whole" and found:
        (file,) = found.values()  # its tree may be nested
        index = one_file(file.index, limits)
        return replace(index, format=_format_name(layout, [file]), notes=(*layout.notes, *index.notes)), (file,)
    if (
        layout.kind in {"parts", "parameters"}
        and not problems
        and any(has_shards(file.index) for file in found.values())
    ):
        return _merge_shards(layout, list(found.values()), limits)
    if any(PLACES in file.index.metadata for file in found.values()):
        found = {name: replace(file, index=without_places(file.index, limits)) for name, file in found.items()}
    parts = {name: _part(layout, name, file.index.tree, limits) for name, file in found.items()}
    tied, tied_notes = _find_ties(layout, found, parts.values(), problems, limits)
    parts = _with_tied(parts, tied) if tied else parts
    notes = _compare(layout, parts, problems)
    if problems:
        error = problems.error(layout.path)
        if layout.kind == "parameters" and not any(part is not None for part in parts.values()):
            error.advice = f"These may be separate checkpoints: pass the path of one, such as {layout.files[0]!r}."
        elif layout.kind == "parts" and not isinstance(error, IncompleteCheckpointError):
            error.advice = "These are not the parts of one checkpoint: pass the path of one, or only its files."
        raise error
    files, tree = _join(list(found.values()), list(parts.values()))
    index = _index(_format_name(layout, files), files, tree, (*layout.notes, *notes, *tied_notes, *_file_notes(found)))
    size_note = _size_note(layout.shard_index, index)
    return replace(index, notes=(*index.notes, *size_note), contradictions=(*notes, *size_note)), tuple(files)


def _merge_shards(
    layout: CheckpointLayout, files: Sequence[OpenFile], limits: Limits
) -> tuple[Index, tuple[OpenFile, ...]]:
    """Return the index of the files of FSDP1's ranks, which have the same names."""
    parts = [_by_name(file) for file in files]
    unique = [{f"{number} {name}": value for name, value in part.items()} for number, part in enumerate(parts)]
    joined, values = _join(files, unique)
    ranks = [
        RankFile(file.index.files[0].path, {name: values[f"{number} {name}"] for name in part})
        for number, (file, part) in enumerate(zip(files, parts, strict=True))
    ]
    tree, notes = join_shards(ranks, limits)
    whole = joined_tree(files[0].index.tree, tree)
    return _index("torch-sharded", joined, whole, (*layout.notes, *notes)), tuple(joined)


def _by_name(file: OpenFile) -> dict[str, object]:
    """Return the values of a file by their dotted names, of which no two may be equal."""
    values: dict[str, object] = {}
    for name, value in trees.leaves(file.index.tree):
        if name in values:
            problem = "two values of a rank have the same dotted name"
            raise FormatError(problem, file=file.index.files[0].path, tensor=name)
        values[name] = value
    return values


def _index(name: str, files: Sequence[OpenFile], tree: object, notes: tuple[str, ...]) -> Index:
    """Return the index of joined files, with the metadata that all of them share."""
    first, *others = (file.index.metadata for file in files)
    return Index(
        format=name,
        files=tuple(chain.from_iterable(file.index.files for file in files)),
        storages=tuple(chain.from_iterable(file.index.storages for file in files)),
        tree=tree,
        metadata={key: text for key, text in first.items() if all(other.get(key) == text for other in others)},
        notes=notes,
        located=all(file.index.located for file in files),
    )


def _find_ties(
    layout: CheckpointLayout,
    files: Mapping[str, OpenFile],
    parts: Iterable[Mapping[str, object] | None],
    problems: _Problems,
    limits: Limits,
) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Return the stored name of each tied name, and a note on those left out; ``parts`` are the state dicts."""
    if not any(file.index.tied for file in files.values()):
        return {}, ()
    weight_map = layout.shard_index.weight_map if layout.shard_index else {}
    declarations = [
        Declaration(name, part or {}, file.index.tied) for (name, file), part in zip(files.items(), parts, strict=True)
    ]
    ties = find_ties(declarations, weight_map, layout.path, limits)
    if ties.contradictory:
        problems[_TIED].extend(map(repr, ties.contradictory))
    return ties.stored, ties.notes


def _with_tied(
    parts: Mapping[str, dict[str, object] | None], tied: Mapping[str, str]
) -> dict[str, dict[str, object] | None]:
    """Return the state dicts with the tied names in those of the files that store their tensors."""
    others: defaultdict[str, list[str]] = defaultdict(list)
    for name, stored in tied.items():
        others[stored].append(name)
    return {
        file: part and {**part, **{name: value for key, value in part.items() for name in others.get(key, ())}}
        for file, part in parts.items()
    }


def _add_missing(problems: _Problems, layout: CheckpointLayout, missing: Sequence[str]) -> None:
    counts = Counter(layout.shard_index.weight_map.values() if layout.shard_index else ())
    for name in missing:
        problems[_MISSING].append(f"{name!r}, tensors: {counts[name]}" if counts else repr(name))


def _part(layout: CheckpointLayout, name: str, tree: object, limits: Limits) -> dict[str, object] | None:
    """Return the state dict that a file contributes, or None if it holds something else."""
    if layout.kind == "ranks":
        return rank_tensors(name, tree, limits)
    if layout.kind == "parameters":
        one = isinstance(tree, (Entry, UnsupportedValue))
        return {name.removesuffix(PARAMETER_SUFFIX): tree} if one else None
    return tree if isinstance(tree, dict) and all(type(key) is str for key in tree) else None


def _compare(
    layout: CheckpointLayout, parts: Mapping[str, dict[str, object] | None], problems: _Problems
) -> tuple[str, ...]:
    """Add what the files contradict each other and the index file in; return notes on what the index leaves out."""
    places: dict[str, str] = {}
    repeated: set[str] = set()
    for name, part in parts.items():
        if part is None:
            expected = "one tensor" if layout.kind == "parameters" else "a state dict"
            problems[_UNUSABLE].append(f"{name!r} does not hold {expected}")
            continue
        for key in sorted(places.keys() & part.keys()):
            problems[_REPEATED].append(f"{key!r} in {places[key]!r} and {name!r}")
            repeated.add(key)
        places.update(dict.fromkeys(part, name))
    if layout.shard_index is None:
        return ()
    weight_map = layout.shard_index.weight_map
    for key, shard in weight_map.items():
        place = places.get(key)
        if place is None and parts.get(shard) is not None:
            problems[_MISPLACED].append(f"{key!r} is neither in {shard!r} nor in any other file")
        elif place not in {None, shard} and key not in repeated:
            problems[_MISPLACED].append(f"{key!r} is in {place!r}, not in {shard!r}")
    extra = _omitted(weight_map, parts)
    return (f"{listed('In the shards, but not in their index', extra)}.",) if extra else ()


def _omitted(weight_map: Mapping[str, str], parts: Mapping[str, dict[str, object] | None]) -> list[str]:
    """Return the names that the index omits, without further names of tensors that it has."""
    omitted = []
    for part in parts.values():
        outside = [name for name in part if name not in weight_map] if part else []
        if part and outside:
            indexed = {id(value) for name, value in part.items() if name in weight_map}
            omitted += [name for name in outside if id(part[name]) not in indexed]
    return omitted


def _join(
    files: Sequence[OpenFile], parts: Sequence[dict[str, object] | None]
) -> tuple[list[OpenFile], dict[str, object]]:
    """Return the files and the merged tree, with storages numbered across files."""
    joined: list[OpenFile] = []
    tree: dict[str, object] = {}
    versions: dict[object, object] = OrderedDict()
    first = 0
    for file, part in zip(files, parts, strict=True):
        position, own = len(joined), file.index.storages
        storages = tuple(replace(storage, file=position) for storage in own)
        index = replace(file.index, storages=storages, tree=None, tied={})
        joined.append(replace(file, index=index, first_storage=first))
        tree.update(_shifted(part or {}, by=first))
        own_versions = trees.metadata(file.index.tree)
        if isinstance(own_versions, dict):
            versions.update(renumbered(own_versions, by=first))
        first += len(own)
    if versions:
        tree = OrderedDict(tree)
        tree._metadata = versions  # type: ignore[attr-defined]  # noqa: SLF001  (torch's own name for it)
    return joined, tree


def _shifted(part: Mapping[str, object], *, by: int) -> dict[str, object]:
    """Return a state dict with the storages of its entries shifted by ``by``; shared entries stay shared."""
    plain = (value for value in part.values() if isinstance(value, Entry) and _is_plain(value))
    new = {id(entry): replace(entry, storage=entry.storage + by) for entry in plain}
    others = renumbered({name: value for name, value in part.items() if id(value) not in new}, by=by, known=new)
    return {name: new.get(id(value)) or others[name] for name, value in part.items()}


def _is_plain(entry: Entry) -> bool:
    return entry.storage != NO_STORAGE and entry.attributes is None


def renumbered(tree: object, *, by: int | Mapping[int, int], known: dict[int, Entry] | None = None) -> Any:
    """Return a tree with entries ``moved``, also in tensors that wrap others; ``known`` gets each new one by old id."""
    new = {} if known is None else known

    def shift(entry: Entry) -> Entry:
        if id(entry) not in new:
            new[id(entry)] = moved(entry, by=by)
        return new[id(entry)]

    def unwrapped(value: object) -> object:
        if isinstance(value, UnsupportedValue) and value.inner is not None:
            return dataclasses.replace(value, inner=trees.map_leaves(value.inner, shift))
        return value

    return trees.map_leaves(tree, shift, plain=unwrapped)


def moved(entry: Entry, *, by: int | Mapping[int, int]) -> Entry:
    """Return an entry, with its components and attributes, with storages shifted by a number, or renumbered."""
    storage = entry.storage
    if storage != NO_STORAGE:
        storage = storage + by if isinstance(by, int) else by[storage]
    if _is_plain(entry):
        return replace(entry, storage=storage)
    shift = partial(moved, by=by)
    made, parts = entry.composite, tuple(replace(part, entry=shift(part.entry)) for part in entry.parts)
    if isinstance(made, Sparse):
        made = replace(made, indices=tuple(map(shift, made.indices)), values=shift(made.values))
    elif made is not None:
        scales, zero_points = (shift(one) if isinstance(one, Entry) else one for one in (made.scales, made.zero_points))
        made = replace(made, values=shift(made.values), scales=scales, zero_points=zero_points)
    attributes = trees.map_leaves(entry.attributes, shift)
    return replace(entry, storage=storage, parts=parts, composite=made, attributes=attributes)


def _size_note(shard_index: ShardIndex | None, index: Index) -> tuple[str, ...]:
    """Return a note if the total size in the index file equals neither the stored bytes nor those of its tensors."""
    if shard_index is None or shard_index.total_bytes is None:
        return ()
    assert isinstance(index.tree, dict)
    named = [index.tree[name] for name in shard_index.weight_map]
    if any(isinstance(value, Opaque) for value in named):
        return ()  # their sizes are unknown
    entries = [value for value in named if isinstance(value, Entry)]
    by_name = sum(entry.nbytes for entry in entries)
    stored = sum(index.storages[number].nbytes for number in {n for entry in entries for n in entry.storages})
    if shard_index.total_bytes in {by_name, stored}:
        return ()
    return (f"The index declares a total size of {shard_index.total_bytes} bytes; its tensors have {by_name}.",)


def _format_name(layout: CheckpointLayout, files: Sequence[OpenFile]) -> str:
    pickled = any(file.index.format != "safetensors" for file in files)
    if layout.kind == "ranks":
        return "torch-ranks"
    if layout.kind == "whole" and layout.files[0] in RANK_FILES:
        return files[0].index.format
    if layout.kind == "parts":
        if all(file.index.format == "gguf" for file in files):
            return "gguf-parts"
        return "torch-parts" if pickled else "safetensors-parts"
    if layout.kind == "parameters":
        return "per-parameter"
    return "huggingface-bin" if pickled else "huggingface-safetensors"


def _file_notes(files: Mapping[str, OpenFile]) -> tuple[str, ...]:
    """Return the distinct notes of the files, each with the names of its files."""
    of: defaultdict[str, list[str]] = defaultdict(list)
    for name, file in files.items():
        for note in file.index.notes:
            of[note].append(name)
    return tuple(note if len(files) == 1 else f"{listed('files', names)}: {note}" for note, names in of.items())
