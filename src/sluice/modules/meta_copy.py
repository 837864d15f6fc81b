"""Run the loading code of a module on a copy without data.

``MetaCopy`` has meta tensors in place of the module's, copies of its containers, and shares all else. ``CopyRecorder``
notes which symbolic tensor (``symbolic_tensors``) is copied into which of these, and stops at every other write.
``untouched`` is the proof that the module is as before: it compares the attributes of the module's parts, and of the
objects in them, and restores what changed.
"""

from __future__ import annotations

import os
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from sluice.modules.leftovers import is_plain
from sluice.modules.load_hooks import pre_hooks
from sluice.modules.swap import with_data, writes
from sluice.modules.symbolic_tensors import CannotFollow, SymbolicTensor, entry_of_values
from sluice.records import Entry
from sluice.sharding.dtensors import is_dtensor, local_of

__all__ = ["CopyRecorder", "MetaCopy", "NotFollowedError", "reason_of", "untouched"]

# nn.Module documents these names for subclasses only; they have no public accessor.
# ruff: noqa: SLF001

#: Properties that a stand-in shows as a live tensor would, because code treats tensors on meta differently.
_SHOWN = {torch.Tensor.device.__get__: torch.device("cpu"), torch.Tensor.is_meta.__get__: False}  # type: ignore[attr-defined]  # C descriptors

#: Functions that return their tensor, with no change of its shape.
_SAME = frozenset({torch.Tensor.detach, torch.Tensor.data.__get__})  # type: ignore[attr-defined]  # a C descriptor

#: Functions that end in an underscore and change no element.
_HARMLESS = frozenset({"requires_grad_", "rename_"})

#: Attributes in which a module keeps its tensors and parts.
_MEMBERS = ("_parameters", "_buffers", "_modules")

#: Containers that the copy does not share with the module.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, deque)

#: Levels of containers in attributes that are copied and compared.
_NESTING = 4

_TORCH, _SLUICE = (f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


class NotFollowedError(Exception):
    """Code does something that is impossible without data; the message continues "the loader of x ..."."""


def reason_of(error: Exception) -> str:
    """Return why code failed on tensors without data, and the line of the module's code where it did."""
    where = _line_of(reversed(list(walk_tb(error.__traceback__))))
    if isinstance(error, CannotFollow):
        return f"computes with values: {error}{where}"
    return f"fails on tensors without data: {type(error).__name__}: {error}{where}"


def _calling_line() -> str:
    """Return the line of the module's code that is running."""
    return _line_of(walk_stack(sys._getframe(1)))


def _line_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the line of the module's code; frames start at the innermost call.

    It is the first line outside of torch and sluice, or, for modules of torch, the first one of torch.
    """
    of_torch = ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith(_SLUICE):
            if of_torch:
                break  # the rest is the caller of sluice
        elif file.startswith(_TORCH):
            of_torch = of_torch or f" ({Path(file).name}, line {line})"
        elif not file.startswith("<frozen"):
            return f" ({Path(file).name}, line {line})"
    return of_torch


class MetaCopy:
    """A copy of a module and its children with tensors on meta and containers of its own."""

    def __init__(self, module: nn.Module, members: Callable[[nn.Module, str], Mapping[str, Any]]) -> None:
        """Copy a module.

        Args:
            module: The module; it is not changed.
            members: Further attributes of each part, from the part and its prefix.

        Raises:
            NotFollowedError: It holds tensors of a kind that has no stand-in.
        """
        #: Full name and stand-in of every tensor, by the stand-in's identity.
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._members = members
        self._copy_of: dict[int, nn.Module] = {}
        self._copies: list[tuple[nn.Module, str, dict[str, Any]]] = []
        self.module = self._copy(module, "")
        for part, _, before in self._copies:
            held = vars(part)
            held.update({name: self._isolated(value) for name, value in held.items() if name not in _MEMBERS})
            held["_load_state_dict_pre_hooks"] = OrderedDict(enumerate(self._hooks(part)))
            before.update({name: _contents(value) for name, value in held.items()})

    def _copy(self, module: nn.Module, prefix: str) -> nn.Module:
        part: nn.Module = object.__new__(type(module))
        held = vars(part)
        held.update(vars(module))
        for kind in ("_parameters", "_buffers"):
            tensors = vars(module)[kind]
            held[kind] = {name: self._stand_in(prefix + name, tensor) for name, tensor in tensors.items()}
        held["_modules"] = {
            name: child and self._copy(child, f"{prefix}{name}.") for name, child in module._modules.items()
        }
        held.update(self._members(part, prefix))
        self._copy_of.setdefault(id(module), part)
        self._copies.append((part, prefix, {}))
        return part

    def _stand_in(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if not (is_lazy(tensor) or is_plain(local_of(tensor))):
            raise NotFollowedError(f"loads {name!r}, which is a {type(tensor).__name__}")
        stand_in = _whole(tensor) if is_dtensor(tensor) else _empty(tensor)
        self.tensors[id(stand_in)] = (name, stand_in)
        return stand_in

    def _hooks(self, part: nn.Module) -> Iterator[Callable[..., object]]:
        """Yield the pre-hooks of a part of the copy, which get the copy in place of the module."""
        for wrapped in pre_hooks(part):
            hook = self._isolated(getattr(wrapped, "hook", wrapped))
            yield partial(hook, part) if getattr(wrapped, "with_module", False) else hook

    def _isolated(self, value: Any, depth: int = _NESTING) -> Any:
        """Return the value of an attribute for the copy: no container, and no part of the module, is shared."""
        if isinstance(value, nn.Module):
            return self._copy_of.get(id(value), value)
        if isinstance(value, types.MethodType) and id(value.__self__) in self._copy_of:
            return types.MethodType(value.__func__, self._copy_of[id(value.__self__)])
        if type(value) not in _CONTAINERS or not depth:
            return value
        copied = copy(value)
        if isinstance(copied, dict):
            copied.update({key: self._isolated(member, depth - 1) for key, member in value.items()})
        elif value:
            members = [self._isolated(member, depth - 1) for member in value]
            copied = deque(members, value.maxlen) if isinstance(value, deque) else type(value)(members)
        return copied

    def attributes(self) -> dict[str, Entry]:
        """Return the entries that the code made attributes of the module, as metrics keep their state, by full name.

        Raises:
            NotFollowedError: It changed anything else but the state dict.
        """
        entries = {}
        for part, prefix, before in self._copies:
            after = vars(part)
            for name in dict.fromkeys((*before, *after)):
                if name in before and name in after and _is_as_before(before[name], _contents(after[name])):
                    continue
                if isinstance(after.get(name), SymbolicTensor):
                    entries[prefix + name] = after[name].entry
                elif name in _MEMBERS:
                    raise NotFollowedError(f"replaces tensors or parts of the module of {type(part).__name__}")
                else:
                    raise NotFollowedError(f"sets the attribute {name!r} of {type(part).__name__}")
        return entries

    def clear(self) -> None:
        """Drop what the copy refers to: its parts refer to themselves, and to weak references of the module."""
        for part, _, before in self._copies:
            vars(part).clear()
            before.clear()


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        lazy: torch.Tensor = type(tensor)(device="meta")  # type: ignore[call-arg]  # torch types the base class
        return lazy
    return with_data(tensor, torch.empty_like(tensor, device="meta", requires_grad=False))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of the shape of a DTensor: code gets whole tensors, of which the match takes the part."""
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(whole, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole


def _contents(value: Any, depth: int = _NESTING) -> Any:
    """Return the members of containers, as far as they are compared; other values unchanged."""
    if type(value) not in _CONTAINERS or not depth:
        return value
    if isinstance(value, dict):
        return (value, list(value), [_contents(member, depth - 1) for member in value.values()])
    return (value, [_contents(member, depth - 1) for member in value])


def _is_as_before(before: Any, after: Any) -> bool:
    """Return whether two results of ``_contents`` are of the same objects; plain values may be equal."""
    if type(before) in {tuple, list} and type(after) is type(before):
        return len(before) == len(after) and all(map(_is_as_before, before, after))
    if before is after:
        return True
    return type(before) is type(after) and isinstance(before, (bool, int, float, str)) and before == after


class CopyRecorder(TorchFunctionMode):
    """Records which symbolic tensor is copied into which tensor of a module, and stops at every other write."""

    def __init__(
        self, own: Mapping[int, tuple[str, torch.Tensor]], copied: Callable[[str, Entry], None], problems: list[str]
    ) -> None:
        super().__init__()
        self._own = {stand_in: name for stand_in, (name, _) in own.items()}
        self._copied = copied
        self._kept: list[torch.Tensor] = []  # an id is unique only while its tensor is alive
        #: Gets the operations that cannot be followed, also those whose exception the code catches.
        self.problems = problems

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; the only in-place operations that are followed are copies of whole tensors.

        Raises:
            NotFollowedError: Another in-place operation.
            CannotFollow: An operation on elements.
        """
        name = getattr(func, "__name__", "")
        if args and id(args[0]) in self._own and func in _SHOWN:
            return _SHOWN[func]
        if func is torch.Tensor.copy_ and len(args) > 1 and self._copies(*args[:2]):
            return args[0]
        if (writes(name) and name not in _HARMLESS) or "out" in (kwargs or {}):
            self._stop(f"writes to tensors with {name}")
        try:
            result = func(*args, **(kwargs or {}))
        except CannotFollow as error:
            self.problems.append(f"computes with values: {error}{_calling_line()}")
            raise
        if isinstance(result, torch.Tensor) and args and id(args[0]) in self._own and func in _SAME:
            self._kept.append(result)
            self._own[id(result)] = self._own[id(args[0])]
        return result

    def _copies(self, target: torch.Tensor, source: Any) -> bool:
        """Note a copy of a symbolic tensor, or of the values that the tensor has; return whether it was one."""
        name = self._own.get(id(target))
        if name is None:
            return False
        if self._own.get(id(source)) == name:
            return True  # it keeps its values
        if not isinstance(source, torch.Tensor):
            return False
        if id(source) in self._own:
            self._stop(f"loads the module's own {self._own[id(source)]!r} as {name!r}")
        try:
            self._copied(name, source.entry if isinstance(source, SymbolicTensor) else entry_of_values(source))
        except CannotFollow as error:
            self._stop(f"adds {name!r}: {error}")
        return True

    def _stop(self, problem: str) -> None:
        self.problems.append(f"{problem}{_calling_line()}")
        raise NotFollowedError(self.problems[-1])


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of a module, its parts and plain objects in them if the block changed any.

    Code can reach the module itself, and not only its copy, through closures and objects that both share.

    Raises:
        NotFollowedError: The block changed one.
    """
    before = [(held, dict(held)) for held in _attributes(module)]
    changed = False
    try:
        yield
    finally:
        for held, content in before:
            same = held.keys() == content.keys() and all(held[name] is value for name, value in content.items())
            if not same:
                changed = True
                held.clear()
                held.update(content)
    if changed:
        raise NotFollowedError("changes the module or an object that it holds, other than through its state dict")


def _attributes(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the dicts that hold the attributes and members of a module's parts, and of plain objects in them."""
    seen = set()
    for part in module.modules():
        yield vars(part)
        yield from (vars(part)[kind] for kind in _MEMBERS)
        for value in vars(part).values():
            held = getattr(value, "__dict__", None)
            is_code = isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module))
            if type(held) is dict and not is_code and not isinstance(value, torch.Tensor) and id(held) not in seen:
                seen.add(id(held))
                yield held
