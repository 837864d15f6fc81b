"""Recognize the state of an optimizer in each of the forms in which checkpoints hold it. Pure; no torch.

Parameters are numbered or named. torch's own optimizers write numbers, in the order of the parameter groups::

    {"state": {0: {"step": ..., "exp_avg": ...}, ...}, "param_groups": [{"lr": ..., "params": [0, 1]}, ...]}

torch.distributed.checkpoint and FSDP write the names of the parameters in their model, nested in the same way or
flat: ``state.NAME.exp_avg`` and ``param_groups.NAME.lr``, where each parameter repeats the options of its group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from msgspec import Struct, field

from sluice._units import format_bytes
from sluice.entries.tree import every_entry
from sluice.matching.name_fit import unwrap
from sluice.matching.renaming import Renaming

__all__ = ["ParameterNames", "SavedState", "as_list", "saved_state", "saved_states"]

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)

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
    #: Parameter groups.
    groups: list[dict[str, object]]
    #: Whether parameters are named; otherwise they are numbered.
    named: bool
    #: Whether each parameter is its own group, because the flat form does not record groups.
    ungrouped: bool = False
    #: Values next to state and groups.
    rest: dict[object, object] = field(default_factory=dict)

    @property
    def ids(self) -> list[list[object]]:
        """Number or name of each parameter, by group."""
        return [as_list(group.get("params")) for group in self.groups]

    def describe(self) -> str:
        """Return one line for users: where it is and how large."""
        where = f"key={self.key!r}" if self.key else "the whole checkpoint"
        entries = list(every_entry(self.state))
        groups = "" if self.ungrouped else f" in {len(self.groups)} groups"
        parameters = sum(map(len, self.ids))
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
            if not saved.ungrouped:
                continue
        start = f"{path}." if path else ""
        children = list(value.items() if isinstance(value, dict) else enumerate(value))
        pending += [(f"{start}{name}", child) for name, child in reversed(children)]


def saved_state(part: object, key: str, names: ParameterNames) -> SavedState | None:
    """Return a part of the checkpoint as the state of an optimizer, or None if it is not one."""
    if not isinstance(part, dict):
        return None
    groups, state = part.get("param_groups"), part.get("state", {})
    if isinstance(groups, list) and isinstance(state, dict) and all(isinstance(group, dict) for group in groups):
        return _nested(part, key)
    options = _by_owner(part, _GROUPS, names)
    if not options:
        return None
    return SavedState(
        key=key,
        state=dict(_by_owner(part, _STATE, names).items()),
        groups=[{**group, "params": [parameter]} for parameter, group in options.items()],
        named=True,
        ungrouped=True,
    )


def _nested(part: Mapping[Any, Any], key: str) -> SavedState | None:
    groups = [dict(group) for group in part["param_groups"]]
    ids = list(chain.from_iterable(as_list(group.get("params")) for group in groups))
    if not all(isinstance(parameter, (int, str)) for parameter in ids):
        return None
    named = any(isinstance(parameter, str) for parameter in ids)
    state = dict(part.get("state", {}))
    if not named:  # a distributed checkpoint stores keys of dicts as text, and positions in lists as numbers
        state = {int(key) if isinstance(key, str) and _NUMBER.fullmatch(key) else key: v for key, v in state.items()}
    rest = {name: value for name, value in part.items() if name not in {"state", "param_groups"}}
    return SavedState(key=key, state=state, groups=groups, named=named, rest=rest)


def _by_owner(flat: Mapping[Any, object], start: str, names: ParameterNames) -> dict[str, dict[str, object]]:
    """Return the values under ``start`` by owner and name: of ``NAME.exp_avg``, either part may contain dots.

    The owner is the longest known name; without one, all but the last component.
    """
    by_owner: dict[str, dict[str, object]] = {}
    for name, value in flat.items():
        if isinstance(name, str) and name.startswith(start):
            rest = name.removeprefix(start)
            ends = [match.start() for match in re.finditer(r"\.", rest)] or [0]
            end = next((end for end in reversed(ends[-_DEEPEST:]) if rest[:end] in names), ends[-1])
            by_owner.setdefault(rest[:end], {})[rest[end + 1 :]] = value
    return by_owner


def as_list(value: object) -> list[object]:
    """Return a list or tuple as a list, and an empty list for anything else."""
    return list(value) if isinstance(value, (list, tuple)) else []
