"""Select the content of a conversion: the whole tree of a checkpoint, or a flat state dict. No torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from reprlib import repr as short_repr

from msgspec import Struct

from sluice._dtypes import is_castable
from sluice._errors import LimitError, MismatchError
from sluice._messages import listed
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries import tree as trees
from sluice.entries.lookup import subtree
from sluice.entries.rules import Rule, apply_rules
from sluice.matching.candidates import outside, whole_states
from sluice.matching.renaming import Rename, Renaming
from sluice.matching.selection import state_dict_at
from sluice.records import Entry

__all__ = ["ConvertedContents", "finished_dtype", "flat_contents", "refuse_repeats", "whole_contents"]


class ConvertedContents(Struct, frozen=True, kw_only=True):
    """The converted part of a checkpoint."""

    #: A nested object, or a flat dict of entries.
    tree: object
    #: Its key in the checkpoint; empty for the whole.
    key: str
    #: Sentences about omitted content.
    notes: tuple[str, ...]
    #: Number of tensor names of the checkpoint that it comes from.
    taken: int
    #: Number of tensor names of the checkpoint.
    total: int


def finished_dtype(entry: Entry, dtype: str | None) -> str:
    """Return the dtype of an entry in the new file, if real floats are cast to ``dtype``."""
    return entry.cast or (dtype if dtype is not None and is_castable(entry.dtype) else entry.dtype)


def whole_contents(
    checkpoint: OpenCheckpoint, *, key: str | None, rename: Rename | None, rules: Sequence[Rule]
) -> ConvertedContents:
    """Return the whole object or the part at ``key``; with ``rename`` or ``rules`` the state dict in it, flat.

    Raises:
        MismatchError: ``key`` does not exist, there is no unique state dict to rename, or the rules do not apply.
        UnsafeContentError: It contains an object that only running code could build.
        UnsupportedError: It contains a kind of tensor that sluice does not read.
    """
    tree = checkpoint.index.tree
    if rename is None and not rules:
        path = key or ""
        chosen = subtree(tree, path)
        trees.refuse_opaques(chosen, checkpoint.path)
        return _converted(tree, chosen, path, chosen, _count(chosen))
    chosen, path = state_dict_at(tree, key, checkpoint.path)
    trees.refuse_opaques(chosen, checkpoint.path)
    renaming = Renaming(rename)
    states = whole_states(chosen)
    entries, taken = _entries(checkpoint, chosen, renaming, rules, states)
    renamed: dict[str, object] = {**entries}
    values = [each for each in trees.leaves(chosen) if not isinstance(each[1], Entry)]
    for name, value in renaming.apply(outside(states, values) | states).items():
        if name in renamed:
            raise MismatchError(
                "rename maps a tensor and another value to the same name", file=checkpoint.path, tensor=name
            )
        renamed[name] = value
    state_dict = OrderedDict(renamed)
    state_dict.__dict__.update(getattr(chosen, "__dict__", {}))
    return _converted(tree, chosen, path, state_dict, taken + sum(map(_count, states.values())))


def flat_contents(
    checkpoint: OpenCheckpoint, *, key: str | None, rename: Rename | None, rules: Sequence[Rule]
) -> ConvertedContents:
    """Return the tensors of the state dict at ``key``, or of the only state dict, by name.

    Raises:
        MismatchError: ``key`` does not exist, there is no unique state dict, a name is not a string, or the rules do
            not apply.
        UnsafeContentError: It contains an object that only running code could build.
        UnsupportedError: It contains a kind of tensor that sluice does not read.
    """
    tree = checkpoint.index.tree
    chosen, path = state_dict_at(tree, key, checkpoint.path)
    trees.refuse_opaques(chosen, checkpoint.path)
    notes = []
    values = [name for name, value in trees.leaves(chosen) if not isinstance(value, Entry) or value.bare]
    if values:
        notes.append(listed("values that are not tensors were left out", list(map(repr, values))))
    flags = sum(entry.parameter for entry in trees.every_entry(chosen))
    if flags:
        notes.append(f"{flags} parameters became plain tensors: the format has no requires_grad")
    entries, taken = _entries(checkpoint, chosen, Renaming(rename), rules)
    tensors = {name: entry for name, entry in entries.items() if not entry.bare}
    taken -= len(entries) - len(tensors)
    return _converted(tree, chosen, path, tensors, taken, notes)


def refuse_repeats(entries: Mapping[str, Entry], checkpoint: OpenCheckpoint) -> None:
    """Refuse to write many more bytes than the source holds: expanded tensors, and overlapping views.

    Raises:
        LimitError: The additional bytes exceed ``limits.repeated_bytes``.
    """
    written_bytes: Counter[int] = Counter()
    for entry in entries.values():
        for piece in entry.pieces:
            if piece.constant is None:
                written_bytes[piece.storage] += piece.nbytes
    storages = checkpoint.index.storages
    repeated = {number: nbytes - storages[number].nbytes for number, nbytes in written_bytes.items()}
    total = sum(nbytes for nbytes in repeated.values() if nbytes > 0)
    if total > checkpoint.limits.repeated_bytes:
        worst = max(entries, key=lambda name: entries[name].nbytes)
        problem = "views of shared bytes would be written in full; format='torch' keeps them as views"
        expected = f"at most {checkpoint.limits.repeated_bytes} bytes more (repeated_bytes)"
        raise LimitError(problem, file=checkpoint.path, tensor=worst, expected=expected, found=f"{total} bytes")


def _entries(
    checkpoint: OpenCheckpoint,
    chosen: Mapping[str, object],
    renaming: Renaming,
    rules: Sequence[Rule],
    states: Collection[str] = (),
) -> tuple[dict[str, Entry], int]:
    """Return the tensors by their new names, and the number of names of the checkpoint that they come from.

    Those at or below the names of ``states`` are left out.

    Raises:
        MismatchError: None is left, a name is not a string, or the rules do not apply.
    """
    for key in trees.odd_keys(chosen):
        problem = f"tensor names must be strings, not {type(key).__name__}"
        raise MismatchError(problem, file=checkpoint.path, tensor=short_repr(key))
    flat = outside(states, trees.flatten(chosen, checkpoint.limits).items())
    renamed = renaming.apply(flat)
    renaming.check([*outside(states, trees.leaves(chosen)), *states])
    entries = apply_rules(renamed, rules)
    if not (entries or states) and checkpoint.entries:
        problem = f"none of its {len(checkpoint.entries):,} tensors would be converted"
        raise MismatchError(problem, file=checkpoint.path, found=f"{len(flat):,} tensors before rename and rules")
    return entries, _used(renamed, entries) if rules else len(renamed)


def _used(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> int:
    """Return the number of entries that rules kept, or made new entries of."""
    own = {id(entry) for entry in before.values()}
    kept = {id(entry) for entry in after.values()}
    made_of = {number for entry in after.values() if id(entry) not in own for number in entry.storages}
    return sum(id(entry) in kept or not made_of.isdisjoint(entry.storages) for entry in before.values())


def _count(tree: object) -> int:
    return sum(1 for _ in trees.walk(tree))


def _converted(
    tree: object, chosen: object, key: str, made: object, taken: int, more: Iterable[str] = ()
) -> ConvertedContents:
    """Return what was made of the part of a tree at a key, with notes on the rest of the tree and ``more``."""
    notes = [*more]
    if chosen is not tree:
        kept = {id(entry) for entry in trees.every_entry(chosen)}
        outside = [entry for entry in trees.every_entry(tree) if id(entry) not in kept]
        values = sum(not isinstance(value, Entry) for _, value in trees.leaves(tree))
        values -= sum(not isinstance(value, Entry) for _, value in trees.leaves(chosen))
        if outside or values:
            left = f"{len(outside)} tensors and {values} other values outside it were left out"
            notes.insert(0, f"only {key!r} was taken: {left}")
    return ConvertedContents(tree=made, key=key, notes=tuple(notes), taken=taken, total=_count(tree))
