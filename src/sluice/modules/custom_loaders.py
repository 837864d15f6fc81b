"""Follow the code that ``load_state_dict`` runs, on a copy of a module without data.

torch's ``load_state_dict``, or that of the module, runs on a copy of the module whose tensors are on the meta device
(``meta_copy``), with a state dict of symbolic tensors. Pre-hooks and overrides usually rename, drop or add entries and
leave the rest to ``nn.Module``, which then copies each entry into a tensor of the copy: these copies are the state dict
to load. The lists of torch's own ``_load_from_state_dict`` say what is missing and unexpected, so that ``strict`` and
errors are torch's, and code that catches them and tries again is followed too.

Code that computes values, resizes tensors, or changes the module other than through its state dict is a problem with
the reason. The module is not touched.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn

from sluice._private_torch import EXTRA_STATE_KEY
from sluice.matching.candidates import Candidate
from sluice.modules.collect import collect, has_custom_loader
from sluice.modules.load_hooks import Followed, Loader, pre_hooks
from sluice.modules.meta_copy import CopyRecorder, MetaCopy, NotFollowedError, reason_of, untouched
from sluice.modules.symbolic_tensors import CannotFollow, SymbolicTensor, entry_of_values
from sluice.records import Entry

__all__ = ["follow_code", "own_load_state_dict"]

# nn.Module documents these names for subclasses only; they have no public accessor.
# ruff: noqa: SLF001

_ADVICE = "it needs the tensors themselves: pass it the result of sluice.load_state_dict(file), with a real model"


class _Call(Struct, eq=False):
    """Reports of a call of ``nn.Module.load_state_dict``, by the names of the whole module."""

    missing: set[str] = field(default_factory=set)
    unexpected: dict[str, Entry] = field(default_factory=dict)
    #: Tensors of a different shape, which torch does not copy.
    misfits: dict[str, Entry] = field(default_factory=dict)


def own_load_state_dict(module: nn.Module, *, strict: bool) -> Loader:
    """Return the ``load_state_dict`` of a module that overrides it."""
    options = {"strict": False} if not strict and _takes_strict(type(module).load_state_dict) else {}

    def load(copy: nn.Module, state: Mapping[str, Any]) -> None:
        if "load_state_dict" in vars(copy):
            raise NotFollowedError("is set on the instance, not the class")  # it may be bound to the module
        copy.load_state_dict(state, **options)

    return Loader(name=f"the load_state_dict of {type(module).__name__}", load=load)


def _takes_strict(method: Callable[..., object]) -> bool:
    """Return whether a ``load_state_dict`` takes the argument ``strict``; some take the state dict alone."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return True
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_all or "strict" in parameters


def follow_code(
    module: nn.Module, found: Candidate, *, loader: Loader | None, strict: bool, ignore_mismatched: bool
) -> Followed:
    """Return the state dict that the code of a module loads.

    Args:
        module: The module.
        found: As in ``following.follow_loading``, and so are the other arguments.
        loader: Code that takes the place of torch's ``load_state_dict``; None for torch's, and its hooks alone.
        strict: See there.
        ignore_mismatched: See there.
    """
    state: OrderedDict[str, Any] = OrderedDict((name, SymbolicTensor(entry)) for name, entry in found.entries.items())
    state.update({n: SymbolicTensor(v) if isinstance(v, Entry) else v for n, v in found.extra_state.items()})
    if found.versions:
        state._metadata = OrderedDict((path, {"version": version}) for path, version in found.versions.items())  # type: ignore[attr-defined]  # torch's own name
    follower = _Follower(module, loader, strict=strict, ignore_mismatched=ignore_mismatched)
    follower.run(state)
    return follower.result(found.entries)


class _Follower:
    """Runs the code and notes what it loads."""

    def __init__(self, module: nn.Module, loader: Loader | None, *, strict: bool, ignore_mismatched: bool) -> None:
        self._module = module
        self._override = loader is not None
        self._loader = loader or Loader(
            name=f"the load_state_dict of {type(module).__name__}",
            load=lambda copy, state: nn.Module.load_state_dict(copy, state, strict=False),
        )
        #: Whether what is missing or unexpected in the end is an error; an override has decided it.
        self._strict = strict and not self._override
        self._keeps_misfits = ignore_mismatched or not self._override  # matching reports them
        self._outline = collect(module).outline
        self._ties = {name: slot.names for slot in self._outline.slots if len(slot.names) > 1 for name in slot.names}
        self._calls: dict[str, _Call] = {}  # the last one of each module, by its path with a dot
        self._loaded: dict[str, Entry] = {}
        self._extra_state: dict[str, object] = {}
        self._assigned: set[str] = set()
        self._assigns = False  # whether torch is assigning tensors instead of copying them
        self._stops: list[str] = []  # operations that were not followed, also if the code caught the exception
        self._problems: list[str] = []
        self._attributes: Mapping[str, Entry] = {}

    def run(self, state: Mapping[str, Any]) -> None:
        """Run the code, and note the problems."""
        try:
            copy = MetaCopy(self._module, self._members)
            try:
                failure = self._failure(copy, state)
                self._attributes = copy.attributes()
            finally:
                copy.clear()
            if not (failure or self._stops or self._calls or self._loaded or self._attributes):
                raise NotFollowedError("neither calls that of nn.Module nor copies a tensor")
        except Exception as error:  # noqa: BLE001  foreign code may raise anything
            failure = error
        last = next(reversed(self._calls.values()), _Call())
        shapes = {name: slot.shape for slot in self._outline.slots for name in slot.names}
        misfits = {name for name, entry in last.misfits.items() if entry.shape != shapes.get(name)}
        if isinstance(failure, RuntimeError) and (misfits or last.unexpected or last.missing - self._found()):
            self._strict = self._keeps_misfits = True  # torch has raised it, and matching reports the same
            self._loaded = {name: entry for name, entry in self._loaded.items() if name not in misfits}
            failure = None
        self._note(self._loader.name, failure)

    def _failure(self, copy: MetaCopy, state: Mapping[str, Any]) -> Exception | None:
        """Run the code on a copy; return the error that it raises."""
        try:
            with untouched(self._module), CopyRecorder(copy.tensors, self._load, self._stops), torch.no_grad():
                self._loader.load(copy.module, state)
        except Exception as error:  # noqa: BLE001  foreign code may raise anything
            return error
        return None

    def _note(self, described: str, error: Exception | None = None) -> None:
        """Note what was not followed since the last time."""
        found = dict.fromkeys(self._stops)
        if isinstance(error, NotFollowedError):
            found[str(error)] = None
        elif error is not None and not found:
            found[reason_of(error)] = None
        self._stops.clear()
        advice = f"; {_ADVICE}" if self._override and described == self._loader.name else ""
        self._problems += [f"{described} {problem}{advice}" for problem in found]

    def _found(self) -> set[str]:
        """Return the names of loaded tensors, and all other names of those."""
        return self._loaded.keys() | {mate for name in self._loaded for mate in self._ties.get(name, ())}

    def _members(self, part: nn.Module, prefix: str) -> dict[str, Any]:
        """Return attributes of a part of the copy that take the place of its methods and hooks."""
        described = self._loader.name
        if has_custom_loader(part) or any(True for _ in pre_hooks(part)):
            what = "_load_from_state_dict" if has_custom_loader(part) else "load_state_dict pre-hook"
            described = f"the {what} of {prefix.removesuffix('.') or 'the module'} ({type(part).__name__})"
        if "_load_from_state_dict" in vars(part):  # it is bound to the module and not to the copy
            self._problems.append(f"{described} is set on the instance, not the class")
        return {
            "_load_from_state_dict": partial(self._load_part, part, prefix, described),
            "_load_state_dict_post_hooks": OrderedDict({0: partial(self._forget_ties, prefix)}),
            "set_extra_state": partial(self._extra_state.__setitem__, prefix + EXTRA_STATE_KEY),
        }

    def _load_part(
        self,
        part: nn.Module,
        prefix: str,
        described: str,
        state: dict[str, Any],
        start: str,
        metadata: dict[str, Any],
        *others: Any,
    ) -> None:
        """Run ``_load_from_state_dict`` of a part with lists of its own, and note what it reports."""
        self._note(self._loader.name)
        if not start:
            self._calls.pop(prefix, None)
        self._assigns = metadata.pop("assign_to_params_buffers", False)
        strict, *lists = others
        own: list[list[str]] = [[], [], []]
        failure, before = None, len(self._problems)
        try:
            type(part)._load_from_state_dict(part, state, start, metadata, strict, *own)
        except Exception as error:  # noqa: BLE001  foreign code may raise anything
            failure = error
        self._assigns = False
        self._note(described, failure)
        if len(self._problems) == before:  # otherwise the lists say nothing
            for reported, names in zip(lists, self._reported(prefix, start, described, state, own), strict=True):
                reported.extend(names)

    def _reported(
        self, prefix: str, start: str, described: str, state: dict[str, Any], own: list[list[str]]
    ) -> tuple[list[str], list[str], list[str]]:
        """Note what a part reports as missing, unexpected and wrong, and return what torch should get of it."""
        missing, unexpected, errors = own
        call = self._calls.setdefault(prefix.removesuffix(start) if start else prefix, _Call())
        full = {key: prefix + key.removeprefix(start) for key in (*missing, *unexpected, *state)}
        known = {name for slot in self._outline.slots for name in slot.names} | {*self._outline.extra_state}
        others = [f"it requires {key!r}" for key in missing if full[key] not in known]
        others += [f"it does not expect {key!r}" for key in unexpected if key not in state]
        call.missing |= known.intersection(full[key] for key in missing)
        call.unexpected |= self._entries({full[key]: state[key] for key in unexpected if key in state})
        misfits = {}
        for error in errors:
            key = error.removeprefix("size mismatch for ").partition(": ")[0]
            if error.startswith("size mismatch for ") and key in state:
                misfits[full[key]] = state[key]
            else:
                others.append(error)
        call.misfits |= self._entries(misfits)
        self._problems += [f"{described} rejects the state dict: {each}" for each in others]
        return missing, unexpected, others if self._keeps_misfits else errors

    def _forget_ties(self, prefix: str, _: nn.Module, reported: Any) -> None:
        """Do not miss a name of a tensor that was loaded by another name; run by torch at the end of each part."""
        found = self._found()
        reported.missing_keys[:] = [key for key in reported.missing_keys if prefix + key not in found]

    def _entries(self, values: Mapping[str, Any]) -> dict[str, Entry]:
        """Return the entries of tensors that torch has not copied; note extra state, and anything else as a problem."""
        entries = {}
        for name, value in values.items():
            if name.rpartition(".")[2] == EXTRA_STATE_KEY:
                self._extra_state[name] = value
            elif not isinstance(value, torch.Tensor):
                self._stops.append(f"adds {name!r}, which is not a tensor but a {type(value).__name__}")
            else:
                try:
                    entries[name] = value.entry if isinstance(value, SymbolicTensor) else entry_of_values(value)
                except CannotFollow as error:
                    self._stops.append(f"adds {name!r}: {error}")
        return entries

    def _load(self, name: str, entry: Entry) -> None:
        self._loaded[name] = entry
        (self._assigned.add if self._assigns else self._assigned.discard)(name)

    def result(self, given: Mapping[str, Entry]) -> Followed:
        """Return what the code loads."""
        misfits, unexpected, missing = dict[str, Entry](), dict[str, Entry](), set[str]()
        for call in self._calls.values():
            misfits |= call.misfits
            unexpected |= call.unexpected
            missing |= call.missing
        if not self._keeps_misfits:  # the override has caught the error
            # Optional on meta is stricter than missing, which it accepts: there is no value to keep.
            live = {name for slot in self._outline.slots if not slot.on_meta for name in slot.names}
            missing |= live & misfits.keys()
            misfits = {}
        missing -= self._found() | misfits.keys()
        return Followed(
            entries=unexpected | misfits | self._loaded,
            extra_state={n: v.entry if isinstance(v, SymbolicTensor) else v for n, v in self._extra_state.items()},
            optional_names=frozenset(name for slot in self._outline.slots for name in slot.names) - missing,
            problems=tuple(dict.fromkeys(self._problems)),
            strict=self._strict,
            assigned=frozenset(self._assigned),
            receivers=tuple(prefix.removesuffix(".") for prefix in self._calls),
            attributes=self._attributes,
            notes=tuple(self._notes(given)) if self._override else (),
        )

    def _notes(self, given: Mapping[str, Entry]) -> Iterator[str]:
        name_of = {id(entry): name for name, entry in given.items()}
        taken = [name for name, entry in self._loaded.items() if id(entry) in name_of]
        renamed = sum(name_of[id(self._loaded[name])] != name for name in taken)
        derived = len(self._loaded) - len(taken)
        if renamed or derived or len(taken) < len(given):
            yield (
                f"{self._loader.name} passed on {len(taken)} of {len(given)} tensors of the checkpoint, {renamed} of "
                f"them renamed, and {derived} that it made"
            )
