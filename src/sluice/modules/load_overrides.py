"""Follow a module that overrides ``load_state_dict``, on a copy without data.

Such a method usually renames, drops or adds entries and calls ``super().load_state_dict``, or that of some parts. It
runs on a copy of the module (``meta_copy``) with a state dict of symbolic tensors. torch's own ``load_state_dict`` runs
as well, and passes what it got to ``_load_from_state_dict`` of the copy, which is replaced here: it works out from
names and shapes what that call would load, and what it would report as missing and unexpected. So ``strict`` and the
errors are torch's own, and code that catches them and tries again is followed too.

What reaches ``nn.Module.load_state_dict``, of the module or of its parts, is the state dict to load. Copies of single
tensors by the method itself count as well. A method that needs values is refused, and the module is not touched.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn
from torch.nn.modules import module as torch_module

from sluice._errors import MismatchError
from sluice._messages import Findings
from sluice._private_torch import EXTRA_STATE_KEY
from sluice.matching.match import Match, Outline, match
from sluice.modules.collect import collect
from sluice.modules.custom_loaders import follow_parts
from sluice.modules.load_hooks import Followed, Loader
from sluice.modules.meta_copy import CopyRecorder, MetaCopy, NotFollowedError, reason_of, untouched
from sluice.modules.symbolic_tensors import CannotFollow, SymbolicTensor, entry_of_values
from sluice.records import Entry

__all__ = ["follow_override", "own_load_state_dict"]

_ADVICE = "it needs the tensors themselves: pass it the result of sluice.load_state_dict(file), with a real model"


class _Call(Struct, frozen=True, kw_only=True):
    """A call of ``nn.Module.load_state_dict``; names are those of the whole module."""

    #: Path of the module that was called.
    path: str
    #: The state dict after hooks and loaders.
    entries: Mapping[str, Entry]
    #: Names of tensors that it does not require.
    optional_names: frozenset[str]
    #: Extra state in it.
    extra_state: Mapping[str, object]
    #: Versions in its metadata.
    versions: Mapping[str, int]
    #: Whether it assigns tensors instead of copying them.
    assign: bool

    @property
    def prefix(self) -> str:
        """The path with its dot."""
        return f"{self.path}." if self.path else ""

    def misfits(self, outline: Outline) -> dict[str, str]:
        """Return the names whose shape is not the module's, which torch does not copy, and torch's error for each."""
        errors = {}
        for slot in outline.slots:
            for name in slot.names:
                entry = self.entries.get(name)
                if entry is None or slot.lazy or entry.shape == slot.shape:
                    continue
                if slot.shape != () or entry.shape != (1,):
                    errors[name] = (
                        f"size mismatch for {name.removeprefix(self.prefix)}: copying a param with shape "
                        f"{torch.Size(entry.shape)} from checkpoint, the shape in current model is "
                        f"{torch.Size(slot.shape)}."
                    )
        return errors

    def without(self, names: Collection[str]) -> _Call:
        """Return it without these tensors, which are not missing either."""
        if not names:
            return self
        entries = {name: entry for name, entry in self.entries.items() if name not in names}
        return replace(self, entries=entries, optional_names=self.optional_names.union(names))

    def match(self, outline: Outline, *, strict: bool, problems: Iterable[str] = ()) -> Match:
        """Match it with the tensors of the module that was called, as if all of them were live.

        Raises:
            MismatchError: As ``matching.match``.
        """
        slots = [
            replace(slot, names=names, device="cpu" if slot.on_meta else slot.device)
            for slot in outline.slots
            if (names := tuple(name for name in slot.names if name.startswith(self.prefix)))
        ]
        under = replace(
            outline,
            slots=tuple(slots),
            extra_state=tuple(name for name in outline.extra_state if name.startswith(self.prefix)),
            problems=tuple(problems),
        )
        return match(
            under,
            self.entries,
            strict=strict,
            versions=self.versions,
            extra_state=self.extra_state,
            optional_names=self.optional_names,
            allow_empty=not strict,  # a part may take nothing; whether the whole module does is decided at the end
        )


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


def follow_override(
    module: nn.Module,
    entries: Mapping[str, Entry],
    extra_state: Mapping[str, object],
    *,
    versions: Mapping[str, int],
    loader: Loader,
    ignore_mismatched: bool = False,
) -> Followed:
    """Return the state dict that the code passes to ``nn.Module.load_state_dict``.

    The other arguments are those of ``following.follow_loading``.

    Raises:
        MismatchError: It needs values, or what it passes on does not fit.
    """
    outline = collect(module).outline
    state: OrderedDict[str, Any] = OrderedDict((name, SymbolicTensor(entry)) for name, entry in entries.items())
    state.update({n: SymbolicTensor(v) if isinstance(v, Entry) else v for n, v in extra_state.items()})
    if versions:
        state._metadata = OrderedDict((path, {"version": version}) for path, version in versions.items())  # type: ignore[attr-defined]  # torch's own name  # noqa: SLF001
    try:
        follower = _Follower(module, outline, loader, ignore_mismatched=ignore_mismatched)
        follower.run(state)
    except NotFollowedError as error:
        problem = f"{loader.name} {error}; {_ADVICE}"
        Findings(others=[problem, *outline.problems]).raise_if_any()
    return follower.result(entries)


class _Follower:
    """Runs one override and collects what it loads, in the order of its calls."""

    def __init__(self, module: nn.Module, outline: Outline, loader: Loader, *, ignore_mismatched: bool) -> None:
        self._module = module
        self._loader = loader
        self._outline = outline
        self._ignore_mismatched = ignore_mismatched
        self._mismatched: dict[str, Entry] = {}
        self._copy = MetaCopy(module, "", members=self._members)
        self._recorder = CopyRecorder(self._copy.tensors, self._load)
        self._calls: list[_Call] = []
        self._differs = False  # whether the last call has something to report
        self._loaded: dict[str, Entry] = {}
        self._extra_state: dict[str, object] = {}
        self._assigned: set[str] = set()
        self._problems: list[str] = []
        self._attributes: dict[str, Entry] = {}

    def run(self, state: Mapping[str, Any]) -> None:
        """Run the code.

        Raises:
            NotFollowedError: It cannot be followed.
            MismatchError: What it passed on does not fit.
        """
        try:
            with untouched(self._module), self._recorder, torch.no_grad():
                self._loader.load(self._copy.module, state)
        except NotFollowedError:
            raise
        except Exception as error:  # foreign code may raise anything
            self._stop_if_problem()
            if self._differs and isinstance(error, RuntimeError):
                problems = (*self._outline.problems, *self._problems)
                self._calls[-1].match(self._outline, strict=True, problems=problems)
            raise NotFollowedError(reason_of(error)) from error
        self._stop_if_problem()
        if not (self._calls or self._loaded or self._attributes):
            raise NotFollowedError("neither calls that of nn.Module nor copies a tensor")

    def _stop_if_problem(self) -> None:
        for problem in self._recorder.problems:
            raise NotFollowedError(problem)
        self._attributes |= self._copy.attributes()

    def _members(self, prefix: str) -> dict[str, Any]:
        return {
            "_load_from_state_dict": partial(self._receive, prefix.removesuffix(".")),
            "_load_state_dict_post_hooks": OrderedDict(),  # they run later, on the module itself
        }

    def _receive(
        self,
        path: str,
        state: Mapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        _: object,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Take the place of ``_load_from_state_dict`` in ``nn.Module.load_state_dict``."""
        caller = sys._getframe(1).f_code  # noqa: SLF001  the only way to tell
        if (caller.co_filename, caller.co_name) != (torch_module.__file__, "load"):
            self._stop(f"calls _load_from_state_dict of {path or 'the module'} itself")
        if prefix:
            return  # torch visits the parts of the module that was called, which is followed with them
        call = self._call(path, state, assign=bool(metadata.get("assign_to_params_buffers")))
        self._calls.append(call)
        start = len(call.prefix)
        misfits = call.misfits(self._outline)
        if self._ignore_mismatched:  # matching reports them
            self._mismatched |= {name: call.entries[name] for name in misfits}
        else:
            errors += misfits.values()
        self._differs = True
        try:
            matched = call.without(misfits).match(self._outline, strict=False)
        except MismatchError as error:
            errors.append(str(error))
        else:
            missing += [name[start:] for name in matched.missing]
            unexpected += [name[start:] for name in matched.unexpected]
            self._differs = bool((misfits and not self._ignore_mismatched) or matched.missing or matched.unexpected)
        own = {name for slot in self._outline.slots for name in slot.names}
        for name, entry in call.entries.items():
            if name in own and name not in misfits:
                self._load(name, entry)
                (self._assigned.add if call.assign else self._assigned.discard)(name)
        self._extra_state.update(call.extra_state)

    def _call(self, path: str, state: Mapping[str, Any], *, assign: bool) -> _Call:
        prefix = f"{path}." if path else ""
        entries: dict[str, Entry] = {}
        extra_state: dict[str, object] = {}
        kept = set()
        for name, value in state.items():
            own = self._recorder.name_of(value)
            if own is not None and own != prefix + name:
                self._stop(f"loads the module's own {own!r} as {prefix + name!r}")
            elif own is not None:
                kept.add(own)
            elif name.rpartition(".")[2] == EXTRA_STATE_KEY:
                extra_state[name] = value.entry if isinstance(value, SymbolicTensor) else value
            elif isinstance(value, torch.Tensor):
                entries[name] = self._entry(name, value)
            else:
                self._stop(f"adds {name!r}, which is not a tensor but a {type(value).__name__}")
        saved = getattr(state, "_metadata", None) or {}
        versions = {at: held["version"] for at, held in saved.items() if "version" in held}
        followed = follow_parts(self._module.get_submodule(path), entries, extra_state, versions=versions)
        self._problems += followed.problems
        self._attributes |= {prefix + at: entry for at, entry in followed.attributes.items()}
        return _Call(
            path=path,
            entries={prefix + name: entry for name, entry in followed.entries.items()},
            optional_names=frozenset({prefix + name for name in followed.optional_names} | kept),
            extra_state={prefix + name: value for name, value in followed.extra_state.items()},
            versions={(prefix + at).removesuffix("."): version for at, version in versions.items()},
            assign=assign,
        )

    def _entry(self, name: str, value: torch.Tensor) -> Entry:
        try:
            return value.entry if isinstance(value, SymbolicTensor) else entry_of_values(value)
        except CannotFollow as error:
            self._stop(f"adds {name!r}: {error}")

    def _load(self, name: str, entry: Entry) -> None:
        self._loaded[name] = entry

    def _stop(self, problem: str) -> NoReturn:
        self._recorder.problems.append(problem)  # the code may catch the exception
        raise NotFollowedError(problem)

    def result(self, given: Mapping[str, Entry]) -> Followed:
        """Return what the method loads."""
        last = {call.path: call for call in self._calls}.values()
        misfits = {name for call in last for name in call.misfits(self._outline)}  # the method caught the error
        matches = [call.without(misfits).match(self._outline, strict=False) for call in last]
        missing = {name for matched in matches for name in matched.missing}
        # Optional on meta is stricter than missing, which the method accepts: there is no value to keep.
        missing.update(name for slot in self._outline.slots if not slot.on_meta for name in misfits & {*slot.names})
        missing -= self._loaded.keys() | self._mismatched.keys()
        unexpected = {name for matched in matches for name in matched.unexpected}
        not_loaded = {name: call.entries[name] for call in last for name in call.entries if name in unexpected}
        return Followed(
            entries=self._mismatched | self._loaded | not_loaded,
            extra_state=self._extra_state,
            optional_names=frozenset(
                name for slot in self._outline.slots if not missing.intersection(slot.names) for name in slot.names
            ),
            problems=tuple(self._problems),
            strict=False,  # what is missing or unexpected now was not an error for the method
            assigned=frozenset(self._assigned),
            receivers=tuple(call.path for call in last),
            attributes=self._attributes,
            notes=tuple(self._notes(given)),
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
