"""Choose the parts of checkpoints that are compared or verified by name. No torch."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.tree import unsupported, walk
from sluice.matching.candidates import likely_state_dicts, names_by_state_dict
from sluice.matching.selection import only_state_dict

__all__ = ["ComparedPart", "named_part", "part_of", "parts_to_compare"]

#: Names of the tensors in each state dict of a checkpoint, by its key.
_Names = dict[str, set[str]]

#: The argument of ``sluice.diff`` and the option of the command that choose the part of each side.
_ARGUMENTS = (("key", "--key-a"), ("other_key", "--key-b"))


class ComparedPart(Struct, frozen=True, kw_only=True):
    """A part of a checkpoint whose tensors have names."""

    #: The part, as a checkpoint that shares the files of the whole.
    checkpoint: OpenCheckpoint
    #: Its dotted path; None for the whole checkpoint.
    key: str | None
    #: Number of its tensors by name, including those that sluice does not read.
    tensors: int
    #: Number of tensors of the checkpoint outside it.
    outside: int


def part_of(checkpoint: OpenCheckpoint, key: str) -> ComparedPart:
    """Return the part at a key; an empty key is the whole checkpoint.

    Raises:
        MismatchError: The key does not exist.
    """
    part = OpenCheckpoint.open(checkpoint, key=key) if key else checkpoint
    tensors, total = (_count(each.index.tree) for each in (part, checkpoint))
    return ComparedPart(checkpoint=part, key=key or None, tensors=tensors, outside=total - tensors)


def parts_to_compare(
    a: OpenCheckpoint, b: OpenCheckpoint, key: str | None, other_key: str | None
) -> tuple[ComparedPart, ComparedPart]:
    """Return the parts of two checkpoints to compare.

    Without keys, two checkpoints with their state dicts under the same keys are compared as a whole, so that no
    difference between two training checkpoints is left out. For others, see ``_matching_keys``. If these do not decide,
    each side is the part at its key or, without one, the state dict that a load takes: the checkpoint itself if it is
    flat, else the only candidate. A checkpoint without a candidate, such as the state of an optimizer, is compared as a
    whole.

    Raises:
        MismatchError: A key does not exist, or one checkpoint has several state dicts and the other has different ones.
    """
    found = [names_by_state_dict(checkpoint.index.tree) for checkpoint in (a, b)]
    if key is None and other_key is None:
        matching = ("", "") if found[0].keys() == found[1].keys() else _matching_keys(*found)
        if matching is not None:
            return part_of(a, matching[0]), part_of(b, matching[1])
    keys = [
        (only_state_dict(each.index.tree, each.path, argument=argument, option=option) if candidates else "")
        if given is None
        else given
        for each, given, candidates, (argument, option) in zip((a, b), (key, other_key), found, _ARGUMENTS, strict=True)
    ]
    return part_of(a, keys[0]), part_of(b, keys[1])


def _matching_keys(ours: _Names, theirs: _Names) -> tuple[str, str] | None:
    """Return the keys of the parts with the most names in common, or None if the names do not decide.

    The wholes come first: one may be a conversion of the other with all of its state dicts. The parts are the only
    state dict of each side or, if one side has several, the one under the key of the other side's only one. Only names
    in state dicts count: a metric under the same name does not relate two checkpoints.

    Args:
        ours: Names in each state dict of the first checkpoint, without its key.
        theirs: The same of the second.
    """
    pair: tuple[str, str] | None = None
    if len(ours) == len(theirs) == 1:
        pair = next(iter(ours)), next(iter(theirs))
    elif 1 in (len(ours), len(theirs)):
        pair = next(((key, key) for key in ours if key in theirs), None)
    in_parts = len(ours[pair[0]] & theirs[pair[1]]) if pair else 0
    in_wholes = len(_full_names(ours) & _full_names(theirs))
    return ("", "") if in_wholes and in_wholes >= in_parts else pair


def _full_names(names: _Names) -> set[str]:
    return {f"{key}.{name}" if key else name for key, part in names.items() for name in part}


def named_part(checkpoint: OpenCheckpoint, key: str | None, expected: Collection[str] | None) -> ComparedPart:
    """Return the part of a checkpoint whose tensors are named in a verification.

    Args:
        checkpoint: The checkpoint.
        key: The part; None for the whole checkpoint or, if a manifest has none of its names, for the only state dict
            with some of them: a manifest is often that of a conversion, which wrote only the state dict.
        expected: Names in the manifest; None without one.

    Raises:
        MismatchError: The key does not exist.
    """
    if key is not None:
        return part_of(checkpoint, key)
    if expected and not any(name in expected for name, _ in walk(checkpoint.index.tree)):
        named = [
            part
            for part in (part_of(checkpoint, each) for each in likely_state_dicts(checkpoint.index.tree))
            if any(name in expected for name, _ in walk(part.checkpoint.index.tree))
        ]
        if len(named) == 1:
            return named[0]
    return part_of(checkpoint, "")


def _count(tree: object) -> int:
    return sum(1 for _ in walk(tree)) + len(unsupported(tree))
