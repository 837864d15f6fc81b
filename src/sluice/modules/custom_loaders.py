"""Follow load_state_dict pre-hooks, and modules that override ``_load_from_state_dict``, on a copy without data.

Such a method usually renames or drops names and leaves the rest to ``nn.Module``. It runs on a copy of the module
whose tensors are on the meta device (``meta_copy``), with a state dict of symbolic tensors. A method that computes
values, sets attributes or resizes tensors raises ``NotFollowedError`` with the reason. The module is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from sluice._private_torch import EXTRA_STATE_KEY
from sluice.modules.load_hooks import Followed, has_custom_loader, pre_hooks
from sluice.modules.meta_copy import CopyRecorder, MetaCopy, NotFollowedError, reason_of, untouched
from sluice.modules.symbolic_tensors import CannotFollow, SymbolicTensor
from sluice.records import Entry

__all__ = ["follow_parts"]

# nn.Module documents these names for subclasses only; they have no public accessor.
# ruff: noqa: SLF001


def follow_parts(
    module: nn.Module,
    entries: Mapping[str, Entry],
    extra_state: Mapping[str, object],
    *,
    versions: Mapping[str, int],
) -> Followed:
    """Return the state dict after the load_state_dict pre-hooks and custom loaders of the module and its children.

    The arguments are those of ``follow_loading``.
    """
    follower = _Follower(entries, extra_state)
    for path, part in module.named_modules(remove_duplicate=False):
        if has_custom_loader(part) or any(True for _ in pre_hooks(part)):
            follower.follow(path, part, {"version": versions[path]} if path in versions else {})
    return follower.result()


def _hooks_of_copy(part: nn.Module, prefix: str) -> tuple[list[Callable[..., object]], MetaCopy | None]:
    """Return the pre-hooks of a module for a copy of it, and the copy.

    There is no copy if no hook takes the module, or if it holds tensors without a stand-in, such as lazy ones. Then a
    hook gets the module itself, and only stops at the first write.
    """
    hooks: list[Callable[..., object]] = []
    copy: MetaCopy | None = None
    for wrapped in pre_hooks(part):
        hook = getattr(wrapped, "hook", wrapped)
        is_method = getattr(hook, "__self__", None) is part
        with_module = getattr(wrapped, "with_module", False)
        if with_module or is_method:
            try:
                copy = copy or MetaCopy(part, prefix)
            except NotFollowedError:
                return list(pre_hooks(part)), None
            hook = MethodType(hook.__func__, copy.module) if is_method else hook
            hook = partial(hook, copy.module) if with_module else hook
        hooks.append(hook)
    return hooks, copy


def _refuse_copy(name: str, _: Entry) -> NoReturn:
    """Refuse a copy into a tensor of the module: what a hook loads by itself is not followed."""
    raise CannotFollow(f"copies into {name!r}")


class _Follower:
    """Passes one state dict through hooks and loaders, parents first."""

    def __init__(self, entries: Mapping[str, Entry], extra_state: Mapping[str, object]) -> None:
        extra = {
            name: SymbolicTensor(value) if isinstance(value, Entry) else value for name, value in extra_state.items()
        }
        self._state: dict[str, Any] = {name: SymbolicTensor(entry) for name, entry in entries.items()} | extra
        self._optional_names: set[str] = set()
        self._problems: list[str] = []
        self._attributes: dict[str, Entry] = {}

    def follow(self, path: str, part: nn.Module, metadata: dict[str, Any]) -> None:
        """Run the hooks and the loader of one module; note a problem for each thing that cannot be followed."""
        prefix = f"{path}." if path else ""
        # load_state_dict passes a module only the names below it.
        below = {name: self._state.pop(name) for name in list(self._state) if name.startswith(prefix)}
        if has_custom_loader(part):
            below = self._follow_loader(path, part, below, metadata)
        else:
            self._follow_hooks(path, part, below, metadata)
        self._state.update(below)

    def _follow_loader(
        self, path: str, part: nn.Module, below: dict[str, Any], metadata: dict[str, Any]
    ) -> dict[str, Any]:
        described = f"the _load_from_state_dict of {path or 'the module'} ({type(part).__name__})"
        try:
            return self._run_loader(described, part, below, f"{path}." if path else "", metadata)
        except NotFollowedError as error:
            self._problems.append(f"{described} {error}")
            return below

    def _run_loader(
        self, described: str, part: nn.Module, below: Mapping[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> dict[str, Any]:
        """Run the loader of one module on a copy; return the part of the state dict that it leaves.

        Raises:
            NotFollowedError: The loader needs data or changes more than names.
        """
        if "_load_from_state_dict" in vars(part):  # it is bound to the module and not to the copy
            raise NotFollowedError("is set on the instance, not the class")
        copy = MetaCopy(part, prefix)
        given = dict(below)
        missing: list[str] = []
        unexpected: list[str] = []
        errors: list[str] = []
        copied: dict[str, SymbolicTensor] = {}
        recorder = CopyRecorder(copy.tensors, lambda name, entry: copied.update({name: SymbolicTensor(entry)}))
        try:
            with untouched(part), recorder, torch.no_grad():
                copy.module._load_from_state_dict(given, prefix, metadata, True, missing, unexpected, errors)
        except NotFollowedError:
            raise
        except Exception as error:  # foreign code may raise anything
            raise NotFollowedError(reason_of(error)) from error
        for problem in recorder.problems:
            raise NotFollowedError(problem)
        self._attributes |= copy.attributes()
        self._optional_names |= _apply(part, prefix, given, copied, copy.tensors, {*missing}, {*unexpected})
        own = {name for name, _ in copy.tensors.values()} | {prefix + EXTRA_STATE_KEY}
        reported = [error for error in errors if not error.startswith("size mismatch for")]  # matching reports shapes
        reported += [f"it requires {name!r}" for name in missing if name not in own]
        self._problems += [f"{described} rejects the state dict: {error}" for error in reported]
        return given

    def _follow_hooks(self, path: str, part: nn.Module, below: dict[str, Any], metadata: dict[str, Any]) -> None:
        described = f"the load_state_dict pre-hook of {path or 'the module'} ({type(part).__name__})"
        prefix = f"{path}." if path else ""
        missing: list[str] = []
        unexpected: list[str] = []
        errors: list[str] = []
        try:
            hooks, copy = _hooks_of_copy(part, prefix)
            recorder = CopyRecorder(copy.tensors if copy else {}, _refuse_copy)
            with untouched(part), recorder:
                for hook in hooks:
                    # torch always passes strict=True and applies its own strict to the lists at the end.
                    hook(below, prefix, metadata, True, missing, unexpected, errors)
            for problem in recorder.problems:  # the hook may have caught the exception
                raise NotFollowedError(problem)
            if copy:
                self._attributes |= copy.attributes()
        except NotFollowedError as error:
            self._problems.append(f"{described} {error}")
        except Exception as error:  # noqa: BLE001  foreign code may raise anything
            self._problems.append(f"{described} {reason_of(error)}")
        errors += [f"it requires {name!r}" for name in missing] + [
            f"it does not expect {name!r}" for name in unexpected
        ]
        self._problems += [f"{described} rejects the state dict: {error}" for error in errors]
        self._problems += [
            f"{described} computes a tensor from the state dict: {name!r}"
            for name, value in below.items()
            if isinstance(value, torch.Tensor) and not isinstance(value, SymbolicTensor)
        ]

    def result(self) -> Followed:
        """Return the state dict that remains."""
        entries: dict[str, Entry] = {}
        extra_state: dict[str, object] = {}
        for name, value in self._state.items():
            entry = value.entry if isinstance(value, SymbolicTensor) else None
            if name.rpartition(".")[2] == EXTRA_STATE_KEY:
                extra_state[name] = value if entry is None else entry
            elif entry is not None:
                entries[name] = entry
        return Followed(
            entries=entries,
            extra_state=extra_state,
            optional_names=frozenset(self._optional_names),
            problems=tuple(self._problems),
            attributes=self._attributes,
        )


def _apply(
    module: nn.Module,
    prefix: str,
    state: dict[str, Any],
    loaded: Mapping[str, torch.Tensor],
    tensors: Mapping[int, tuple[str, torch.Tensor]],
    missing: set[str],
    unexpected: set[str],
) -> frozenset[str]:
    """Put loaded values under the names of the module's tensors; return the names that are not required."""
    held = {name for kind in (module._parameters, module._buffers) for name, t in kind.items() if t is not None}
    for name in list(state):
        first, _, rest = name.removeprefix(prefix).partition(".")
        expected = first in module._modules if rest else first in held or first == EXTRA_STATE_KEY
        if not expected and name not in unexpected:
            del state[name]
    optional_names = set()
    for name, tensor in tensors.values():
        if name in loaded:
            state[name] = loaded[name]
        elif "." not in name.removeprefix(prefix):
            if name in state and state[name].shape == tensor.shape:
                del state[name]  # the loader left it out
            if name not in state and name not in missing:
                optional_names.add(name)
    return frozenset(optional_names)
