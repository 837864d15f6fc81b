"""Decide what each tensor of an optimizer's state becomes: what torch's ``load_state_dict`` would make of it.

State may stay on another device until the first step. ``Optimizer.load_state_dict`` moves state to its parameters:
tensors of a subclass refuse that move, and a pre-hook of ``step`` does it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch.optim import Optimizer

from sluice._dtypes import dtype_name, why_no_cast
from sluice._errors import MismatchError
from sluice.matching.optimizer_states import MatchedState, OptimizerOutline
from sluice.reading.composites import component_requests
from sluice.records import Entry, Request
from sluice.records.geometry import contiguous_stride, is_dense
from sluice.sharding.dtensors import is_dtensor, local_of, region_held, with_local
from sluice.sharding.regions import select_region

__all__ = ["LeafDecisions", "as_dtensor", "keep_device", "move_at_first_step"]


class _Decision(Struct, frozen=True, kw_only=True):
    """Destination of one tensor of the state."""

    #: Name for messages and reports.
    name: str
    #: Name of the finished dtype.
    dtype: str
    #: Device as torch writes it.
    device: str
    #: Whether it stays on this device until the first step.
    deferred: bool = False


class LeafDecisions:
    """The decision for each leaf of the state.

    Args:
        optimizer: The optimizer that holds the state.
        matched: Its state in the checkpoint.
        outline: The description of its parameters.
        device: Device of the state until the first step; None for the devices of the parameters.
    """

    def __init__(
        self, optimizer: Optimizer, matched: MatchedState, outline: OptimizerOutline, device: str | None
    ) -> None:
        self._optimizer = optimizer
        self._matched = matched
        self._device = device
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        # If a pre-hook changes the number of parameters, the order is only a guess.
        pairs = zip(chain.from_iterable(matched.ids), parameters, outline.parameters, strict=not outline.adapts)
        self._owners = {owner: (parameter, known.names) for owner, parameter, known in pairs}
        self._decisions: dict[int, _Decision] = {}  # by the id of each leaf
        #: Parameters that are divided over ranks, by the id of each leaf that is a part of their state.
        self.divided: dict[int, torch.Tensor] = {}

    @property
    def deferred(self) -> frozenset[int]:
        """Ids of leaves kept on another device until the first step."""
        return frozenset(leaf for leaf, decision in self._decisions.items() if decision.deferred)

    def state_dict(self) -> dict[str, object]:
        """Return the argument of ``Optimizer.load_state_dict``; tensors to convert get separate leaves."""
        groups = [self._group(number) for number in range(len(self._matched.ids))]
        group_of = {owner: group for group in reversed(groups) for owner in group["params"]}
        state = {owner: self._owned(owner, value, group_of) for owner, value in self._matched.state.items()}
        rest = {str(n): self._map(value, str(n), None, self._as_in_file) for n, value in self._matched.rest.items()}
        return {**rest, "state": state, "param_groups": groups}

    def requests(self, entry: Entry) -> list[Request]:
        """Return the requests for a leaf."""
        decision = self._decisions[id(entry)]
        changed = (decision.dtype, decision.device) != (entry.dtype, "cpu")
        requests = component_requests(decision.name, entry, device=decision.device, dtype=decision.dtype)
        parameter = self.divided.get(id(entry))
        if parameter is not None:
            stride = _stride_of_state(entry, parameter)
            return [replace(request, alone=True, stride=stride) for request in requests]
        # torch copies what it converts; tensors that it keeps unchanged may share memory, unless they are assembled.
        return [replace(request, alone=changed or bool(entry.parts)) for request in requests]

    def _group(self, number: int) -> dict[str, Any]:
        own = self._optimizer.param_groups[number] if number < len(self._optimizer.param_groups) else {}
        options = self._matched.options[number]
        if options is None:
            options = {name: value for name, value in own.items() if name != "params"}

        def option(entry: Entry, path: str, _key: object) -> Entry:
            live = own.get(path.rpartition(".")[2])
            where = str(live.device) if isinstance(live, torch.Tensor) and not live.is_meta else "cpu"
            return self._leaf(entry, _Decision(name=path, dtype=entry.dtype, device=where))

        path = f"param_groups.{number}"
        converted = {
            name: self._map(_as_live(value, own.get(name)), f"{path}.{name}", name, option)
            for name, value in options.items()
        }
        return {**converted, "params": list(self._matched.ids[number])}

    def _owned(self, owner: object, value: object, group_of: Mapping[object, dict[str, Any]]) -> object:
        if owner not in self._owners:
            return self._map(value, f"state.{owner}", None, self._as_in_file)
        parameter, names = self._owners[owner]
        on_device = bool(group_of[owner].get("capturable") or group_of[owner].get("fused"))

        def owned(entry: Entry, path: str, key: object) -> Entry:
            decision = self._choice(entry, path, key, parameter, on_device=on_device)
            part = _part_of_state(entry, path, key, parameter)
            leaf = self._leaf(part or entry, decision)
            if part is not None:
                self.divided[id(leaf)] = parameter
            return leaf

        return self._map(value, f"state.{names[0] if names else owner}", None, owned)

    def _choice(self, entry: Entry, path: str, key: object, parameter: torch.Tensor, *, on_device: bool) -> _Decision:
        """Predict the result of ``Optimizer._process_value_according_to_param_policy`` for a tensor."""
        if key == "step" and not on_device:
            return _Decision(name=path, dtype=entry.dtype, device="cpu")
        dtype = entry.dtype
        if key == "step":
            dtype = "float32"
        elif parameter.is_floating_point():
            dtype = dtype_name(parameter.dtype)
        if entry.composite is not None or why_no_cast(entry.dtype, dtype, requires_grad=False):
            dtype = entry.dtype  # torch decides about these
        final = str(parameter.device)
        where = self._device or final
        return _Decision(name=path, dtype=dtype, device=where, deferred=where != final)

    def _as_in_file(self, entry: Entry, path: str, _key: object) -> Entry:
        return self._leaf(entry, _Decision(name=path, dtype=entry.dtype, device="cpu"))

    def _leaf(self, entry: Entry, decision: _Decision) -> Entry:
        """Return the leaf for an entry: the entry itself if torch would keep two uses of it one tensor."""
        if (decision.dtype, decision.device, decision.deferred) != (entry.dtype, "cpu", False):
            entry = replace(entry)
        self._decisions.setdefault(id(entry), decision)
        return entry

    def _map(self, value: object, path: str, key: object, leaf: Callable[[Entry, str, object], Entry]) -> Any:
        """Return a copy of a value with ``leaf(entry, path, key)`` in place of each entry; keys are those of dicts."""
        if isinstance(value, Entry):
            return leaf(value, path, key)
        if isinstance(value, dict):
            return {name: self._map(child, f"{path}.{name}", name, leaf) for name, child in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._map(child, f"{path}.{i}", None, leaf) for i, child in enumerate(value))
        return value


def _part_of_state(entry: Entry, path: str, key: object, parameter: torch.Tensor) -> Entry | None:
    """Return the part of a tensor of the state that belongs to this rank; None if each rank holds all of it.

    State of the parameter's shape is divided like the parameter, as ``torch.zeros_like`` divides it.

    Args:
        entry: The tensor.
        path: Its name, for messages.
        key: Its name in the state of the parameter.
        parameter: The parameter.

    Raises:
        MismatchError: Another shape: it is not known how the optimizer divides it.
    """
    if not is_dtensor(parameter) or key == "step":
        return None
    if entry.shape == tuple(parameter.shape) and entry.composite is None:
        return replace(select_region(entry, region_held(parameter)))  # a leaf of its own
    if not entry.shape:
        return None
    raise MismatchError(
        f"{path!r} is {list(entry.shape)} and its parameter {list(parameter.shape)}: state of a parameter that is "
        "divided over ranks (DTensor) is loaded if it has the parameter's shape",
        tensor=path,
    )


def _stride_of_state(entry: Entry, parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the stride of the state of a parameter on this rank: that of the parameter's memory."""
    local = local_of(parameter)
    fits = tuple(local.shape) == entry.shape and is_dense(entry.shape, local.stride())
    return local.stride() if fits else contiguous_stride(entry.shape)


def as_dtensor(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the state of a parameter on all ranks, from its part on this one."""
    return with_local(parameter, tensor.view(local_of(parameter).shape))


def _as_live(value: object, live: object) -> object:
    """Return text from a file as a dtype if the live value is a dtype."""
    if isinstance(live, torch.dtype) and isinstance(value, str):
        return getattr(torch, value.removeprefix("torch."), value)
    return value


def keep_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that ``Optimizer.load_state_dict`` does not move; it takes the original."""
    fixed = tensor.as_subclass(_Fixed)
    fixed.kept = tensor
    return fixed


class _Fixed(torch.Tensor):
    """A tensor whose ``.to`` returns it unchanged: ``load_state_dict`` would move it to its parameter."""

    kept: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.to and isinstance(args[0], cls):
            return args[0].kept
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  the public class
            return func(*args, **(kwargs or {}))


def move_at_first_step(optimizer: Optimizer) -> None:
    """Move the state of an optimizer to the devices of its parameters when ``step`` is next called.

    Tensors move one at a time: the memory of each is freed as soon as it is copied.
    """
    moved = False

    def move(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        nonlocal moved
        for group in () if moved else optimizer.param_groups:
            steps_too = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                _move(optimizer.state.get(parameter), parameter.device, steps_too=steps_too)
        moved = True

    # It stays: torch is iterating over the hooks while it runs, and fails if one of them is removed.
    optimizer.register_step_pre_hook(move)


def _move(value: Any, device: torch.device, *, steps_too: bool) -> Any:
    """Return a value with its tensors on the device; dicts and lists are changed in place."""
    if isinstance(value, torch.Tensor):
        return value.to(device=device)
    if isinstance(value, dict):
        for name, child in value.items():
            if name != "step" or steps_too or not isinstance(child, torch.Tensor):
                value[name] = _move(child, device, steps_too=steps_too)
    elif isinstance(value, list):
        value[:] = [_move(child, device, steps_too=steps_too) for child in value]
    elif isinstance(value, tuple):
        return tuple(_move(child, device, steps_too=steps_too) for child in value)
    return value
