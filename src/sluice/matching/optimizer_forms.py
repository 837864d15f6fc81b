"""Recognize the state of an optimizer in each of the forms in which checkpoints hold it. Pure; no torch.

Parameters are numbered or named. torch's own optimizers write numbers, in the order of the parameter groups::

    {"state": {0: {"step": ..., "exp_avg": ...}, ...}, "param_groups": [{"lr": ..., "params": [0, 1]}, ...]}

torch.distributed.checkpoint and FSDP write the names of the parameters in their model, nested in the same way or
flat: ``state.NAME.exp_avg`` and ``param_groups.NAME.lr``, where each parameter repeats the options of its group. The
flat form of numbers is ``state.0.exp_avg`` and ``param_groups.0.lr``; ``param_groups.0.params.1`` tells the two apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from sluice._units import format_bytes
from sluice.entries.tree import every_entry
from sluice.matching.name_fit import unwrap
from sluice.matching.renaming import Renaming

__all__ = ["ParameterNames", "SavedState", "as_list", "saved_state", "saved_states"]

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)

#: ``param_groups.0.params.1``, which only the flat form of numbers has.
_NUMBERED_PARAMETER = re.compile(r"param_groups\.[0-9]{1,9}\.params(\.[0-9]{1,9})?", re.ASCII)

#: Start of the flat form in a name that has a prefix.
_MARKED = re.compile(r"(?<!^)\.(state|param_groups)\.")

#: Maximum number of components after the name of a parameter: names come from files and can consist of dots.
_DEEPEST = 4

_STATE, _GROUPS = "state.", "param_groups."


class ParameterNames(Struct, frozen=True, kw_only=True):
    """The names of the optimizer's parameters, and the renaming of those of a checkpoint."""

    #: Names of the optimizer's parameters in the model, unwrapped.
    known: frozenset[str] = frozenset()
    #: New names for the parameters of the checkpoint; None keeps them.
    renaming: Renaming | None = None

    def own(self, name: str) -> str | None:
        """Return the unwrapped name in the model for a name of the checkpoint; None to drop it.

        Raises:
            TypeError: The caller's function returns neither a name nor None.
        """
        new = name if self.renaming is None else self.renaming.new_name(name)
        return None if new is None else unwrap(new)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.own(name) in self.known


class SavedState(Struct, frozen=True, kw_only=True):
    """A part of a checkpoint that is the state of an optimizer."""

    #: Its dotted path in the checkpoint; empty for the whole checkpoint.
    key: str
    #: State of each parameter, by its id in the checkpoint: a number or a name.
    state: dict[object, object]
    #: Parameter groups; None if the checkpoint has none.
    groups: list[dict[str, object]] | None
    #: Whether parameters are named; otherwise they are numbered.
    named: bool
    #: Whether each parameter is its own group, because the flat form does not record groups.
    ungrouped: bool = False
    #: Whether it consists of names in a dict that can hold other values.
    flat: bool = False
    #: Values next to state and groups.
    rest: dict[object, object] = field(default_factory=dict)

    @property
    def ids(self) -> list[list[object]]:
        """Number or name of each parameter, by group."""
        return [as_list(group.get("params")) for group in self.groups or ()]

    def describe(self) -> str:
        """Return one line for users: where it is and how large."""
        where = f"key={self.key!r}" if self.key else "the whole checkpoint"
        entries = list(every_entry(self.state))
        groups = "" if self.groups is None or self.ungrouped else f" in {len(self.groups)} groups"
        parameters = len(self.state) if self.groups is None else sum(map(len, self.ids))
        size = format_bytes(sum(entry.nbytes for entry in entries))
        return f"{where}: {parameters} parameters{groups}, {len(entries)} tensors, {size}"


def saved_states(tree: object, names: ParameterNames) -> Iterator[SavedState]:
    """Yield every part of a checkpoint that is the state of an optimizer, once."""
    seen: set[int] = set()
    pending: list[tuple[str, object]] = [("", tree)]
    while pending:
        path, value = pending.pop()
        if id(value) in seen or not isinstance(value, (dict, list, tuple)):
            continue
        seen.add(id(value))
        saved = saved_state(value, path, names)
        if saved is not None:
            yield saved
            if not saved.flat:
                continue
        start = f"{path}." if path else ""
        children = list(value.items() if isinstance(value, dict) else enumerate(value))
        pending += [(f"{start}{name}", child) for name, child in reversed(children)]
        for prefix, part in _parts_by_prefix(value).items():
            saved = saved_state(part, f"{start}{prefix}", names)
            if saved is not None:
                yield saved


def _parts_by_prefix(value: object) -> dict[str, dict[str, object]]:
    """Return the parts of a dict whose names have a prefix; old distributed checkpoints are not nested."""
    parts: dict[str, dict[str, object]] = {}
    for name, child in value.items() if isinstance(value, dict) else ():
        match = _MARKED.search(name) if isinstance(name, str) else None
        if match:
            parts.setdefault(name[: match.start()], {})[name[match.start() + 1 :]] = child
    return parts


def saved_state(part: object, key: str, names: ParameterNames) -> SavedState | None:
    """Return a part of the checkpoint as the state of an optimizer, or None if it is not one."""
    if not isinstance(part, dict):
        return None
    groups, state = part.get("param_groups"), part.get("state", {})
    if isinstance(groups, list) and isinstance(state, dict) and all(isinstance(group, dict) for group in groups):
        return _nested(part, key)
    flat = {n: value for n, value in part.items() if isinstance(n, str) and n.startswith((_STATE, _GROUPS))}
    if flat:
        saved = _flat(flat, key, names)
        return saved and replace(saved, flat=True)
    if isinstance(state, dict) and state and all(isinstance(each, dict) for each in state.values()):
        return _without_groups(dict(state), key, names)
    return None


def _nested(part: Mapping[Any, Any], key: str) -> SavedState | None:
    groups = [dict(group) for group in part["param_groups"]]
    ids = list(chain.from_iterable(as_list(group.get("params")) for group in groups))
    if not all(isinstance(parameter, (int, str)) for parameter in ids):
        return None
    named = any(isinstance(parameter, str) for parameter in ids)
    state = dict(part.get("state", {}))
    if not named:  # a distributed checkpoint stores keys of dicts as text, and positions in lists as numbers
        state = {_as_number(parameter): value for parameter, value in state.items()}
    rest = {name: value for name, value in part.items() if name not in {"state", "param_groups"}}
    return SavedState(key=key, state=state, groups=groups, named=named, rest=rest)


def _without_groups(state: dict[object, object], key: str, names: ParameterNames) -> SavedState | None:
    """Return state without groups if its keys are those of an optimizer: names of parameters, or numbers."""
    if any(parameter in names for parameter in state):
        return SavedState(key=key, state=state, groups=None, named=True)
    numbered = {_as_number(parameter): value for parameter, value in state.items()}
    if all(isinstance(number, int) for number in numbered):
        return SavedState(key=key, state=numbered, groups=None, named=False)
    return None


def _flat(flat: Mapping[str, object], key: str, names: ParameterNames) -> SavedState | None:
    numbered = any(_NUMBERED_PARAMETER.fullmatch(name) for name in flat)
    if numbered:
        names = ParameterNames()
    state = _by_owner(flat, _STATE, names)
    if numbered:
        options = _by_owner(flat, _GROUPS, names, first=True)
        numbers = sorted(filter(_NUMBER.fullmatch, options), key=int)
        groups = [_numbered_group(options[number]) for number in numbers]
        return _nested({"state": state, "param_groups": groups}, key)
    options = _by_owner(flat, _GROUPS, names)
    if not options:
        return _without_groups(dict(state.items()), key, names)
    groups = [{**group, "params": [parameter]} for parameter, group in options.items()]
    return SavedState(key=key, state=dict(state.items()), groups=groups, named=True, ungrouped=True)


def _by_owner(
    flat: Mapping[str, object], start: str, names: ParameterNames, *, first: bool = False
) -> dict[str, dict[str, object]]:
    """Return the values under ``start`` by owner and name: of ``NAME.exp_avg``, either part may contain dots.

    The owner is the longest known name; without one, all but the last component, or the first with ``first``.
    """
    by_owner: dict[str, dict[str, object]] = {}
    for name, value in flat.items():
        if name.startswith(start):
            rest = name.removeprefix(start)
            ends = [match.start() for match in re.finditer(r"\.", rest)]
            usual = (ends[0] if first else ends[-1]) if ends else 0
            end = next((end for end in reversed(ends[-_DEEPEST:]) if rest[:end] in names), usual)
            by_owner.setdefault(rest[:end], {})[rest[end + 1 :]] = value
    return by_owner


def _numbered_group(options: Mapping[str, object]) -> dict[str, object]:
    """Return a group; its list of parameters can be divided over names: ``params.0``, ``params.1``."""
    group = {name: value for name, value in options.items() if not name.startswith("params.")}
    if "params" not in group:
        divided = {name.removeprefix("params."): value for name, value in options.items() if name not in group}
        group["params"] = [divided[number] for number in sorted(filter(_NUMBER.fullmatch, divided), key=int)]
    return group


def as_list(value: object) -> list[object]:
    """Return a list or tuple as a list, and an empty list for anything else."""
    return list(value) if isinstance(value, (list, tuple)) else []


def _as_number(key: object) -> object:
    return int(key) if isinstance(key, str) and _NUMBER.fullmatch(key) else key
