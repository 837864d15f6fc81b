"""Candidates: the parts of a checkpoint that could be a state dict, and their contents. Pure; no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import TypeVar

from msgspec import Struct

from sluice._errors import MismatchError
from sluice._options import Limits
from sluice.entries.lookup import subtree
from sluice.entries.rules import Rule, apply_rules
from sluice.entries.tree import CONTAINERS, children, component, every_entry, flatten, leaves, sizes, walk
from sluice.matching.renaming import Rename, Renaming
from sluice.records import Entry

__all__ = [
    "Candidate",
    "CandidateReader",
    "extra_states",
    "holds_tensors",
    "likely_state_dicts",
    "names_by_state_dict",
    "outside",
    "state_dict_candidates",
    "whole_states",
]

_Value = TypeVar("_Value")

#: Last component of the names of extra state, which ``get_extra_state`` of a module returns.
_EXTRA_STATE = "_extra_state"

#: Keys of settings, which may hold a tensor such as the weights of classes.
_SETTINGS = frozenset({"args", "cfg", "config", "hparams", "hyper_parameters"})


def likely_state_dicts(tree: object) -> dict[str, list[Entry]]:
    """Return the tensors of each candidate by its key, the largest first, without metrics and settings next to a model.

    They can be tensors by name as well: a dict of scalars, or with no more tensors than other values, counts only if
    every candidate is one.
    """
    return {key: list(every_entry(part)) for key, part in _likely(tree).items()}


def names_by_state_dict(tree: object) -> dict[str, set[str]]:
    """Return the names of the tensors in each part of ``likely_state_dicts``, without its key."""
    return {key: {name for name, _ in walk(part)} for key, part in _likely(tree).items()}


def _likely(tree: object) -> dict[str, object]:
    parts = state_dict_candidates(tree)
    models = {key: part for key, part in parts.items() if _is_model(part)} or parts
    return {key: part for key, part in models.items() if key.rpartition(".")[2] not in _SETTINGS} or models


def _is_model(part: object) -> bool:
    """Return whether a candidate looks like weights: it has tensors with dimensions, and few plain values."""
    values = list(part.values()) if isinstance(part, dict) else []
    others = sum(isinstance(value, (bool, int, float, str, NoneType)) for value in values)
    return any(entry.shape for entry in every_entry(part)) and 2 * others < len(values)


def state_dict_candidates(tree: object) -> dict[str, object]:
    """Return parts that could be state dicts of models by key, the largest first; ``""`` is the whole tree.

    A candidate is a dict that holds tensors by name, and at least half of the bytes below it directly: a loss next to
    a model does not make the whole checkpoint a state dict, and extra state does not split one. Optimizer states are
    not candidates.
    """
    if isinstance(tree, dict) and not any(issubclass(kind, CONTAINERS) for kind in set(map(type, tree.values()))):
        has_tensors = any(isinstance(child, Entry) and isinstance(name, str) for name, child in tree.items())
        return {"": tree} if has_tensors else {}  # a flat state dict, as most are
    below = sizes(tree)
    candidates: dict[str, object] = {}
    seen: set[int] = set()
    states: list[tuple[str, object]] = [("", tree)]
    while states:
        path, value = states.pop()
        if id(value) in seen or not isinstance(value, CONTAINERS) or _is_optimizer_state(value):
            continue
        seen.add(id(value))
        direct = _named_tensor_bytes(value)
        named = path or value is tree  # a dict under an empty name cannot be selected by a key
        if named and direct is not None and 2 * direct >= below[id(value)][1]:
            candidates.setdefault(path, value)
            continue
        prefix = f"{path}." if value is not tree else ""
        named_children = ((name, child) for name, child in children(value) if isinstance(name, (str, int)))
        states += [(prefix + component(name), child) for name, child in reversed(list(named_children))]
    return dict(sorted(candidates.items(), key=lambda item: -below[id(item[1])][1]))


def holds_tensors(tree: object) -> bool:
    """Return whether a dict has keys other than text and holds at least half of its bytes directly."""
    if not isinstance(tree, dict) or all(isinstance(key, str) for key in tree):
        return False
    direct = [child.nbytes for child in tree.values() if isinstance(child, Entry)]
    return bool(direct) and 2 * sum(direct) >= sizes(tree)[id(tree)][1]


def _is_optimizer_state(value: object) -> bool:
    return isinstance(value, dict) and "state" in value and "param_groups" in value


def _named_tensor_bytes(value: object) -> int | None:
    """Return the bytes of the tensors that a dict holds by name, or None if it holds none."""
    if not isinstance(value, dict):
        return None
    nbytes: list[int] = []
    for name, child in value.items():
        if isinstance(child, Entry) and isinstance(name, str):
            nbytes.append(child.nbytes)
        elif isinstance(child, tuple) and isinstance(name, str) and name.endswith("_packed_params"):
            # Weight and bias of a module of torch.ao.nn.quantized.
            nbytes += [each.nbytes for each in child[:2] if isinstance(each, Entry)]
    return sum(nbytes) if nbytes else None


class Candidate(Struct, frozen=True, kw_only=True):
    """A part of a checkpoint that could be a state dict."""

    #: Its dotted path in the checkpoint; None for the whole checkpoint.
    key: str | None
    #: Its tensors after rules, by their new names.
    entries: Mapping[str, Entry]
    #: Version of each module's state by the module's name.
    versions: Mapping[str, int]
    #: Extra state of modules by name; not in ``entries``, even if it is a tensor.
    extra_state: Mapping[str, object]


class CandidateReader(Struct, frozen=True, kw_only=True):
    """Reads parts of a checkpoint as candidates."""

    #: ``Index.tree``.
    tree: object
    #: New names.
    rename: Rename | None
    #: Rules for the tensors.
    rules: tuple[Rule, ...]
    #: Bounds for flattening the tree.
    limits: Limits

    @property
    def changes(self) -> bool:
        """Whether names or tensors change, which may fit one part of the checkpoint and not another."""
        return self.rename is not None or bool(self.rules)

    def read(self, key: str) -> Candidate:
        """Return the part at ``key``; ``""`` is the whole checkpoint.

        Raises:
            FormatError: Two tensors have the same dotted name.
            MismatchError: ``key`` does not exist, or ``rename`` or a rule does not apply.
        """
        part = subtree(self.tree, key) if key else self.tree
        versions = {}
        metadata = getattr(part, "_metadata", None)  # torch's own name for it
        if isinstance(metadata, dict):
            for path, values in metadata.items():
                version = values.get("version") if isinstance(values, dict) else None
                if isinstance(path, str) and type(version) is int:
                    versions[path] = version
        flat = flatten(part, self.limits)
        entries = {
            name: entry
            for name, entry in flat.items()
            if _EXTRA_STATE not in name or _EXTRA_STATE not in name.split(".")
        }
        extra_state = dict(extra_states(part))
        if self.rename is not None:
            renaming = Renaming(self.rename)
            entries, extra_state = renaming.apply(entries), renaming.apply(extra_state)
            renaming.check(name for name, _ in leaves(part))
        if self.rules:
            entries = apply_rules(entries, self.rules)
        return Candidate(key=key or None, entries=entries, versions=versions, extra_state=extra_state)

    def read_all(self, keys: Sequence[str]) -> list[Candidate]:
        """Return the parts to which ``rename`` and rules apply; if there is none, raise the error of the first part."""
        candidates, errors = [], []
        for key in keys:
            try:
                candidates.append(self.read(key))
            except MismatchError as error:
                if not self.changes:
                    raise
                errors.append(error)
        if errors and not candidates:
            raise errors[0]
        return candidates


def whole_states(part: object) -> dict[str, object]:
    """Return the extra state that is not a tensor, by name: it stays whole, as ``set_extra_state`` expects it."""
    return {name: value for name, value in extra_states(part) if not isinstance(value, Entry)}


def outside(states: Collection[str], items: Iterable[tuple[str, _Value]]) -> dict[str, _Value]:
    """Return the items whose names are neither in ``states`` nor below a name in it."""
    ends = re.compile(r"\.|$")
    return {
        name: value
        for name, value in items
        if not (states and any(name[: end.start()] in states for end in ends.finditer(name)))
    }


def extra_states(part: object) -> Iterator[tuple[str, object]]:
    """Yield name and value of the extra state in a flat or nested state dict."""
    pending = [("", part)]
    while pending:
        prefix, value = pending.pop()
        for name, child in value.items() if isinstance(value, dict) else ():
            if isinstance(name, str):
                if name.rpartition(".")[2] == _EXTRA_STATE:
                    yield prefix + name, child
                elif isinstance(child, dict):
                    pending.append((f"{prefix}{name}.", child))
