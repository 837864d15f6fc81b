"""The forms in which checkpoints hold the state of an optimizer, and how one is recognised. Pure; no torch.

Parameters are numbered or named. torch's own optimizers write numbers, in the order of the parameter groups::

    {"state": {0: {"step": ..., "exp_avg": ...}, ...}, "param_groups": [{"lr": ..., "params": [0, 1]}, ...]}

torch.distributed.checkpoint and FSDP write the names that the parameters have in their model, nested in the same way
or flat: ``state.NAME.exp_avg`` and ``param_groups.NAME.lr``, where each parameter repeats the options of its group. The
flat form of numbers is ``state.0.exp_avg`` and ``param_groups.0.lr``; ``param_groups.0.params.1`` tells the two apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from sluice._units import format_bytes
from sluice.entries.tree import every_entry
from sluice.matching.name_fit import unwrap
from sluice.matching.renaming import Rename, renamed

__all__ = ["Names", "SavedState", "as_list", "saved_state", "saved_states"]

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)

#: ``param_groups.0.params.1``, which only a flat form of numbers has.
_NUMBERED_PARAMETER = re.compile(r"param_groups\.[0-9]{1,9}\.params(\.[0-9]{1,9})?", re.ASCII)

#: Where the flat form begins in a name.
_MARKED = re.compile(r"(?<!^)\.(state|param_groups)\.")

#: Components behind the name of a parameter, at most: names come from files and may be all dots.
_DEEPEST = 4

_STATE, _GROUPS = "state.", "param_groups."


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of the optimizer's parameters, and how those of a checkpoint become them."""

    #: Those that are known, without the components of wrappers.
    known: frozenset[str] = frozenset()
    #: New names for those of the checkpoint.
    rename: Rename | None = None

    def own(self, name: str) -> str | None:
        """Return what the model calls what the checkpoint calls ``name``, without wrappers; None where it is dropped.

        Raises:
            TypeError: The caller's function returns neither a name nor None.
        """
        new = name if self.rename is None else renamed(name, self.rename)
        return None if new is None else unwrap(new)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.own(name) in self.known


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A part of a checkpoint that is the state of an optimizer."""

    key: str
    state: dict[object, object]
    #: None where the checkpoint has none.
    groups: list[dict[str, object]] | None
    #: Whether parameters are named, not numbered.
    named: bool
    #: Whether each parameter is a group, because the flat form does not say which were together.
    ungrouped: bool = False
    #: Whether it is names of a dict that may hold more, not a dict of its own.
    flat: bool = False
    rest: dict[object, object] = field(default_factory=dict)

    @property
    def ids(self) -> list[list[object]]:
        """What it calls the parameters of each group."""
        return [as_list(group.get("params")) for group in self.groups or ()]

    def describe(self) -> str:
        where = f"key={self.key!r}" if self.key else "the whole checkpoint"
        entries = list(every_entry(self.state))
        groups = "" if self.groups is None or self.ungrouped else f" in {len(self.groups)} groups"
        parameters = len(self.state) if self.groups is None else sum(map(len, self.ids))
        size = format_bytes(sum(entry.nbytes for entry in entries))
        return f"{where}: {parameters} parameters{groups}, {len(entries)} tensors, {size}"


def saved_states(tree: object, known: Names) -> Iterator[SavedState]:
    """Yield every part that is the state of an optimizer, once."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", tree)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen or not isinstance(value, (dict, list, tuple)):
            continue
        seen.add(id(value))
        saved = saved_state(value, path, known)
        if saved is not None:
            yield saved
            if not saved.flat:
                continue
        start = f"{path}." if path else ""
        children = list(value.items() if isinstance(value, dict) else enumerate(value))
        waiting += [(f"{start}{name}", child) for name, child in reversed(children)]
        for prefix, behind in _behind_prefixes(value).items():
            saved = saved_state(behind, f"{start}{prefix}", known)
            if saved is not None:
                yield saved


def _behind_prefixes(value: object) -> dict[str, dict[str, object]]:
    """Return what stands behind a prefix in the names of a dict: old distributed checkpoints have no nesting."""
    found: dict[str, dict[str, object]] = {}
    for name, child in value.items() if isinstance(value, dict) else ():
        match = _MARKED.search(name) if isinstance(name, str) else None
        if match:
            found.setdefault(name[: match.start()], {})[name[match.start() + 1 :]] = child
    return found


def saved_state(part: object, key: str, known: Names) -> SavedState | None:
    """Return a part of the checkpoint as the state of an optimizer, or None when it is something else."""
    if not isinstance(part, dict):
        return None
    groups, state = part.get("param_groups"), part.get("state", {})
    if isinstance(groups, list) and isinstance(state, dict) and all(isinstance(group, dict) for group in groups):
        return _nested(part, key)
    flat = {n: value for n, value in part.items() if isinstance(n, str) and n.startswith((_STATE, _GROUPS))}
    if flat:
        saved = _flat(flat, key, known)
        return saved and replace(saved, flat=True)
    if isinstance(state, dict) and state and all(isinstance(each, dict) for each in state.values()):
        return _without_groups(dict(state), key, known)
    return None


def _nested(part: Mapping[Any, Any], key: str) -> SavedState | None:
    groups = [dict(group) for group in part["param_groups"]]
    ids = list(chain.from_iterable(as_list(group.get("params")) for group in groups))
    if not all(isinstance(one, (int, str)) for one in ids):
        return None
    named = any(isinstance(one, str) for one in ids)
    state = dict(part.get("state", {}))
    if not named:  # keys of dicts become text in a distributed checkpoint, positions in lists stay numbers
        state = {_as_number(one): value for one, value in state.items()}
    rest = {name: value for name, value in part.items() if name not in {"state", "param_groups"}}
    return SavedState(key=key, state=state, groups=groups, named=named, rest=rest)


def _without_groups(state: dict[object, object], key: str, known: Names) -> SavedState | None:
    """Return state without groups, where what it is by tells that it is an optimizer's."""
    if any(one in known for one in state):
        return SavedState(key=key, state=state, groups=None, named=True)
    if all(isinstance(_as_number(one), int) for one in state):
        return SavedState(key=key, state={_as_number(one): v for one, v in state.items()}, groups=None, named=False)
    return None


def _flat(flat: Mapping[str, object], key: str, known: Names) -> SavedState | None:
    numbered = any(_NUMBERED_PARAMETER.fullmatch(name) for name in flat)
    names = Names() if numbered else known
    state = _owned(flat, _STATE, names)
    if numbered:
        options = _owned(flat, _GROUPS, names, first=True)
        numbers = sorted(filter(_NUMBER.fullmatch, options), key=int)
        groups = [_numbered_group(options[number]) for number in numbers]
        return _nested({"state": state, "param_groups": groups}, key)
    options = _owned(flat, _GROUPS, names)
    if not options:
        return _without_groups(dict(state.items()), key, known)
    alone: list[dict[str, object]] = [{**group, "params": [one]} for one, group in options.items()]
    return SavedState(key=key, state=dict(state.items()), groups=alone, named=True, ungrouped=True)


def _owned(
    flat: Mapping[str, object], start: str, known: Names, *, first: bool = False
) -> dict[str, dict[str, object]]:
    """Return what lies behind ``start`` by its owner: ``NAME.exp_avg``, where both may hold dots.

    The owner is the longest known name; without one, all but the last component, or the first with ``first``.
    """
    owned: dict[str, dict[str, object]] = {}
    for name, value in flat.items():
        if name.startswith(start):
            behind = name.removeprefix(start)
            ends = [match.start() for match in re.finditer(r"\.", behind)]
            usual = (ends[0] if first else ends[-1]) if ends else 0
            end = next((end for end in reversed(ends[-_DEEPEST:]) if behind[:end] in known), usual)
            owned.setdefault(behind[:end], {})[behind[end + 1 :]] = value
    return owned


def _numbered_group(options: Mapping[str, object]) -> dict[str, object]:
    """Return a group whose list of parameters may be spread over names: ``params.0``, ``params.1``."""
    group = {name: value for name, value in options.items() if not name.startswith("params.")}
    if "params" not in group:
        spread = {name.removeprefix("params."): value for name, value in options.items() if name not in group}
        group["params"] = [spread[number] for number in sorted(filter(_NUMBER.fullmatch, spread), key=int)]
    return group


def as_list(value: object) -> list[object]:
    """Return a list or tuple as a list, and an empty list for anything else."""
    return list(value) if isinstance(value, (list, tuple)) else []


def _as_number(key: object) -> object:
    return int(key) if isinstance(key, str) and _NUMBER.fullmatch(key) else key
