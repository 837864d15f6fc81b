"""Modules with their own ``_load_from_state_dict``: what it would do, found out on a copy without data.

Such a method usually renames or drops names and leaves the rest to ``nn.Module``. It runs on a copy of the module
whose tensors are on the meta device, with a state dict of meta tensors that stand for entries. A torch function mode
sees which of them is copied into which tensor. A method that does anything else (computes values, sets attributes,
resizes tensors) cannot be followed, and says why; the module itself is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.overrides import TorchFunctionMode

from sluice.modules.swap import is_plain, with_data

__all__ = ["NotFollowedError", "OwnLoading", "follow_own_loader", "has_own_loader"]

# nn.Module documents these names for subclasses and keeps them private otherwise: there is no public way to ask.
# ruff: noqa: SLF001

_LOADER = "_load_from_state_dict"

#: Loaders of torch's own that do nothing but ``Slot.added_in``.
_KNOWN_LOADERS = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict, _InstanceNorm._load_from_state_dict)

#: What writes to a tensor without a name that says so: setters of properties, and operators
#: that have no method behind them.
_WRITES = frozenset({"__set__", "__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"})

#: What the copy holds as copies of its own.
_COPIED = ("_parameters", "_buffers", "_modules")


class NotFollowedError(Exception):
    """A loader does what cannot be done without data; the text says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoading:
    """What a module's own loader did to its part of a state dict."""

    #: The state dict, by the names that the module uses.
    state: dict[str, Any]
    #: Names of the module's tensors that the loader does not miss.
    optional_names: frozenset[str]
    #: What it complained about.
    errors: tuple[str, ...]


def has_own_loader(module: nn.Module) -> bool:
    """Return whether this module, without its children, loads itself in a way that is not known here."""
    return getattr(module._load_from_state_dict, "__func__", None) not in _KNOWN_LOADERS


def follow_own_loader(module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: dict[str, Any]) -> OwnLoading:
    """Return what the module's own loader makes of ``state``, whose tensors stand for entries.

    Args:
        module: The module; it is left alone.
        state: The part of the state dict below ``prefix``, by its full names.
        prefix: The module's name with a dot, or nothing.
        metadata: What the state dict says of this module.

    Raises:
        NotFollowedError: The loader needs data or changes more than names.
    """
    if _LOADER in vars(module):
        raise NotFollowedError("was given to this one object")  # it is bound to the module and not to the copy
    copy = _Copy(module, prefix)
    loaded = dict(state)
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    watch = _Watch(copy.tensors, state.values())
    try:
        with watch, torch.no_grad():
            copy.module._load_from_state_dict(loaded, prefix, metadata, True, missing, unexpected, errors)
    except Exception as error:  # foreign code may raise anything
        raise NotFollowedError(f"fails on tensors without data: {error}") from error
    for problem in (*watch.problems, *copy.changes()):
        raise NotFollowedError(problem)
    optional_names = _apply(module, prefix, loaded, watch.loaded, copy.tensors, {*missing}, {*unexpected})
    own = {name for name, _ in copy.tensors.values()} | {prefix + _EXTRA_STATE_KEY_SUFFIX}
    complaints = [error for error in errors if not error.startswith("size mismatch for")]  # matching reports shapes
    complaints += [f"it misses {name!r}" for name in missing if name not in own]
    return OwnLoading(state=loaded, optional_names=optional_names, errors=tuple(complaints))


def _apply(
    module: nn.Module,
    prefix: str,
    state: dict[str, Any],
    loaded: Mapping[str, torch.Tensor],
    tensors: Mapping[int, tuple[str, torch.Tensor]],
    missing: set[str],
    unexpected: set[str],
) -> frozenset[str]:
    """Put what was loaded under the names of the module's tensors; return the names that are not missed."""
    held = {name for kind in (module._parameters, module._buffers) for name, t in kind.items() if t is not None}
    for name in list(state):
        first, _, rest = name.removeprefix(prefix).partition(".")
        expected = first in module._modules if rest else first in held or first == _EXTRA_STATE_KEY_SUFFIX
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


class _Copy:
    """A module and its children with tensors on meta in place of their own. Other attributes are the module's own."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        #: Full name and stand-in of every tensor, by the stand-in's identity.
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._made: list[tuple[nn.Module, dict[str, Any], dict[str, dict[str, Any]]]] = []
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
        self._made.append((copy, dict(held), {kind: dict(held[kind]) for kind in _COPIED}))
        return copy

    def _stand_in(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if not is_plain(tensor):
            raise NotFollowedError(f"meets {name!r}, which is a {type(tensor).__name__}")
        stand_in = with_data(tensor, torch.empty_like(tensor, device="meta", requires_grad=False))
        self.tensors[id(stand_in)] = (name, stand_in)
        return stand_in

    def changes(self) -> Iterator[str]:
        """Yield what the loader changed besides the state dict."""
        for copy, before, members in self._made:
            after = vars(copy)
            for name in before.keys() | after.keys():
                if name in _COPIED:
                    if _changed(members[name], after[name]):
                        yield "replaces tensors or parts of the module"
                elif name not in after or name not in before or after[name] is not before[name]:
                    yield f"sets the attribute {name!r}"


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())


class _Watch(TorchFunctionMode):
    """Notes which tensor of a state dict is copied into which tensor of a module, and whatever else is done to them."""

    def __init__(self, own: Mapping[int, tuple[str, torch.Tensor]], given: Iterable[object]) -> None:
        super().__init__()
        self._own = {stand_in: name for stand_in, (name, _) in own.items()}
        self._given = {id(value): value for value in given if isinstance(value, torch.Tensor)}
        self._kept: list[torch.Tensor] = []  # identities count only while the tensors live
        #: What was loaded, by the full name of the module's tensor.
        self.loaded: dict[str, torch.Tensor] = {}
        #: What cannot be followed.
        self.problems: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; of what it does in place only copies of whole entries are understood."""
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.copy_ and len(args) > 1:
            target, source = self._own.get(id(args[0])), self._given.get(id(args[1]))
            if target is not None and source is not None:
                self.loaded[target] = source
            else:
                self.problems.append("computes what it copies")
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
        if id(tensor) in self._given:
            self._given[id(alias)] = self._given[id(tensor)]


def _is_same(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether the result of a call is its tensor again: ``detach``, ``data``, the only element for a scalar."""
    if func is torch.Tensor.__getitem__:
        return tuple(args[0].shape) == (1,) and type(args[1]) is int and args[1] == 0
    return func in {torch.Tensor.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]  # a C descriptor
