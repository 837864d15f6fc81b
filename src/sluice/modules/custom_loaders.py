"""Follow modules that override ``_load_from_state_dict``, on a copy without data.

Such a method usually renames or drops names and leaves the rest to ``nn.Module``. It runs on a copy of the module
whose tensors are on the meta device, with a state dict of meta tensors that stand for entries. A torch function mode
records which of them is copied into which tensor. A method that does anything else (computes values, sets attributes,
resizes tensors) raises ``NotFollowedError`` with the reason. The module itself is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.overrides import TorchFunctionMode

from sluice._private_torch import EXTRA_STATE_KEY, KNOWN_LOADERS
from sluice.modules.swap import is_plain, with_data

__all__ = ["FollowedLoader", "NotFollowedError", "follow_custom_loader", "has_custom_loader"]

# nn.Module documents these names for subclasses only; they have no public accessor.
# ruff: noqa: SLF001

_LOADER = "_load_from_state_dict"

#: Functions that write to a tensor and do not end in an underscore: setters of properties, and operators without a
#: method.
_WRITES = frozenset({"__set__", "__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"})

#: Attributes that the copy does not share with the module.
_COPIED = ("_parameters", "_buffers", "_modules")


class NotFollowedError(Exception):
    """A loader does something that is impossible without data; the message continues "the loader of x ..."."""


class FollowedLoader(Struct, frozen=True, kw_only=True):
    """The part of a state dict that a custom loader leaves."""

    #: Values by the names that the module uses.
    state: dict[str, Any]
    #: Names of the module's tensors that the loader does not require.
    optional_names: frozenset[str]
    #: Errors that it reported.
    errors: tuple[str, ...]


def has_custom_loader(module: nn.Module) -> bool:
    """Return whether this module, without its children, has a loader other than torch's own."""
    return getattr(module._load_from_state_dict, "__func__", None) not in KNOWN_LOADERS


def follow_custom_loader(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: dict[str, Any]
) -> FollowedLoader:
    """Run the module's loader on a copy, with a ``state`` whose tensors stand for entries.

    Args:
        module: The module; it is not changed.
        state: The part of the state dict below ``prefix``, by its full names.
        prefix: The module's name with a dot; empty for the root.
        metadata: Metadata of the state dict for this module.

    Raises:
        NotFollowedError: The loader needs data or changes more than names.
    """
    if _LOADER in vars(module):
        raise NotFollowedError("is set on the instance, not the class")  # it is bound to the module and not to the copy
    copy = _MetaCopy(module, prefix)
    loaded = dict(state)
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    recorder = _CopyRecorder(copy.tensors, state.values())
    try:
        with recorder, torch.no_grad():
            copy.module._load_from_state_dict(loaded, prefix, metadata, True, missing, unexpected, errors)
    except Exception as error:  # foreign code may raise anything
        raise NotFollowedError(f"fails on tensors without data: {error}") from error
    for problem in (*recorder.problems, *copy.changes()):
        raise NotFollowedError(problem)
    optional_names = _apply(module, prefix, loaded, recorder.loaded, copy.tensors, {*missing}, {*unexpected})
    own = {name for name, _ in copy.tensors.values()} | {prefix + EXTRA_STATE_KEY}
    reported = [error for error in errors if not error.startswith("size mismatch for")]  # matching reports shapes
    reported += [f"it requires {name!r}" for name in missing if name not in own]
    return FollowedLoader(state=loaded, optional_names=optional_names, errors=tuple(reported))


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


class _MetaCopy:
    """A copy of a module and its children with tensors on meta. Other attributes are shared with the module."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        #: Full name and stand-in of every tensor, by the stand-in's identity.
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._parts: list[tuple[nn.Module, dict[str, Any], dict[str, dict[str, Any]]]] = []
        self.module = self._copy(module, prefix)

    def _copy(self, module: nn.Module, prefix: str) -> nn.Module:
        copy: nn.Module = object.__new__(type(module))
        held = vars(copy)
        held.update(vars(module))
        for kind in ("_parameters", "_buffers"):
            members = vars(module)[kind]
            held[kind] = {name: self._stand_in(prefix + name, tensor) for name, tensor in members.items()}
        held["_modules"] = {
            name: part and self._copy(part, f"{prefix}{name}.") for name, part in module._modules.items()
        }
        held["set_extra_state"] = lambda _: None  # restored later, on the module itself
        self._parts.append((copy, dict(held), {kind: dict(held[kind]) for kind in _COPIED}))
        return copy

    def _stand_in(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if not is_plain(tensor):
            raise NotFollowedError(f"loads {name!r}, which is a {type(tensor).__name__}")
        stand_in = with_data(tensor, torch.empty_like(tensor, device="meta", requires_grad=False))
        self.tensors[id(stand_in)] = (name, stand_in)
        return stand_in

    def changes(self) -> Iterator[str]:
        """Yield the changes of the loader other than to the state dict."""
        for copy, before, members in self._parts:
            after = vars(copy)
            for name in before.keys() | after.keys():
                if name in _COPIED:
                    if _changed(members[name], after[name]):
                        yield "replaces tensors or parts of the module"
                elif name not in after or name not in before or after[name] is not before[name]:
                    yield f"sets the attribute {name!r}"


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())


class _CopyRecorder(TorchFunctionMode):
    """Records which tensor of a state dict is copied into which tensor of a module, and every other write."""

    def __init__(self, own: Mapping[int, tuple[str, torch.Tensor]], values: Iterable[object]) -> None:
        super().__init__()
        self._own = {stand_in: name for stand_in, (name, _) in own.items()}
        self._values = {id(value): value for value in values if isinstance(value, torch.Tensor)}
        self._kept: list[torch.Tensor] = []  # an id is unique only while its tensor is alive
        #: Tensor of the state dict by the full name of the module's tensor.
        self.loaded: dict[str, torch.Tensor] = {}
        #: Operations that cannot be followed.
        self.problems: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; the only in-place operations that are followed are copies of whole entries."""
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.copy_ and len(args) > 1:
            target, source = self._own.get(id(args[0])), self._values.get(id(args[1]))
            if target is not None and source is not None:
                self.loaded[target] = source
            else:
                self.problems.append("computes values that it copies")
            return args[0]
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")) or "out" in (kwargs or {}):
            self.problems.append(f"writes to tensors with {name}")
            return args[0] if args else None
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and args and _is_same(func, args):
            self._note_alias(args[0], result)
        return result

    def _note_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        self._kept.append(alias)
        if id(tensor) in self._own:
            self._own[id(alias)] = self._own[id(tensor)]
        if id(tensor) in self._values:
            self._values[id(alias)] = self._values[id(tensor)]


def _is_same(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether a call returns its tensor: ``detach``, ``data``, the only element for a scalar."""
    if func is torch.Tensor.__getitem__:
        return tuple(args[0].shape) == (1,) and type(args[1]) is int and args[1] == 0
    return func in {torch.Tensor.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]  # a C descriptor
