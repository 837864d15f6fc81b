"""One load into an optimizer, from its parameters to its state; ``_api.load_optimizer`` measures and reports it.

Each tensor is read to the device and in the dtype that ``Optimizer.load_state_dict`` would give it. So that method,
which gets the finished tensors at the end, has nothing left to move or cast: it merges the groups and runs hooks,
``__setstate__`` and what subclasses have in its place, and the optimizer is as it was until then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sluice._dtypes import dtype_name, why_no_cast
from sluice._errors import MismatchError, UnsupportedError
from sluice._messages import SHOWN, section
from sluice._options import Limits, TransferOptions
from sluice._progress import Progress, byte_progress
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, borrow
from sluice.checkpoint.survey import optimizer_files
from sluice.engine.session import RunResult
from sluice.engine.targets import Targets
from sluice.entries import tree as _tree
from sluice.formats.divided import divided_directory
from sluice.loading.step_hooks import move_at_first_step
from sluice.matching.optimizer_states import MatchedState, OptimizerOutline, ParameterOutline, find_state
from sluice.matching.renaming import Rename
from sluice.reading import transfer as _transfer
from sluice.reading.composites import component_requests, with_tensors
from sluice.reading.transfer import Prepared
from sluice.records import DeviceMemory, Entry, Request
from sluice.sources.opening import open_directory

__all__ = ["OptimizerJob", "fill_optimizer", "optimizer_checkpoint", "prepare_optimizer"]

# torch documents the hooks of optimizers and keeps their dicts private: there is no public way to ask for them.
# ruff: noqa: SLF001


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerJob:
    """A load that is decided and checked; nothing was touched yet."""

    #: The optimizer that holds the state.
    optimizer: Optimizer
    #: What was found for it.
    found: MatchedState
    #: What its ``load_state_dict`` will get, with ``Entry`` leaves.
    state_dict: Mapping[str, object]
    #: The leaves, each once.
    entries: tuple[Entry, ...]
    #: One for each tensor that they are made of.
    requests: tuple[Request, ...]
    #: How.
    prepared: Prepared
    #: Of the leaves that wait elsewhere until the first step, the ids.
    waiting: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What a tensor of the state becomes."""

    name: str
    dtype: str
    device: str
    #: Whether it waits on this device until the first step.
    waits: bool = False


def prepare_optimizer(
    optimizer: Optimizer,
    checkpoint: OpenCheckpoint,
    *,
    model: torch.nn.Module | None,
    key: str | None,
    rename: Rename | None,
    device: str | None,
    options: TransferOptions,
) -> OptimizerJob:
    """Decide a load and check all of it; see ``sluice.load_optimizer`` for the arguments and errors."""
    own = _unwrapped(optimizer)
    outline = _outline(own, model)
    _refuse_parameters(own, outline, checkpoint.path, on_meta=device is None)
    found = find_state(checkpoint.index.tree, outline, key=key, file=checkpoint.path, rename=rename)
    decider = _Decider(own, found, outline, device)
    state_dict = decider.state_dict()
    _tree.refuse_opaques(state_dict, checkpoint.path)
    entries = tuple(_tree.every_entry(state_dict))
    requests = tuple(chain.from_iterable(decider.requests(entry) for entry in entries))
    return OptimizerJob(
        optimizer=own,
        found=found,
        state_dict=state_dict,
        entries=entries,
        requests=requests,
        prepared=_transfer.prepare(checkpoint, requests, share_storages=True, options=options),
        waiting=frozenset(one for one, wish in decider.wishes.items() if wish.waits),
    )


def fill_optimizer(
    job: OptimizerJob, checkpoint: OpenCheckpoint, *, progress: Progress
) -> tuple[RunResult, tuple[DeviceMemory, ...]]:
    """Run a job: read everything, then give it to the optimizer.

    Raises:
        MismatchError: A hook made something of the state that torch refuses.
    """
    plan = job.prepared.plan
    before = _transfer.allocator_state(plan)
    with byte_progress(progress, checkpoint.path, plan.read_bytes) as report:
        tensors, outcome = _transfer.run(checkpoint, job.prepared, Targets(plan), progress=report)
    state_dict = with_tensors(job.state_dict, job.entries, tensors, file=checkpoint.path)
    if job.waiting:
        state_dict["state"] = _staying(job.state_dict["state"], state_dict["state"], job.waiting)
    try:
        job.optimizer.load_state_dict(state_dict)
    except ValueError as error:
        if str(error).startswith("loaded state dict"):  # torch's own words for groups that do not fit
            raise MismatchError(str(error), file=checkpoint.path) from error
        raise
    if job.waiting:
        move_at_first_step(job.optimizer)
    return outcome, _transfer.device_memory(plan, before)


@contextmanager
def optimizer_checkpoint(
    optimizer: Optimizer,
    source: CheckpointSource,
    *,
    model: torch.nn.Module | None = None,
    key: str | None = None,
    rename: Rename | None = None,
    limits: Limits | None = None,
) -> Iterator[OpenCheckpoint]:
    """Open where the state of an optimizer is for the length of the block: of a directory, the file beside the model.

    Of several such files it is the only one that fits, for which the other arguments are looked at.

    Raises:
        MismatchError: The directory holds the state of several optimizers, and not one of them fits.
        UnsupportedError: It holds a state that was divided over ranks.
    """
    path = source.path if isinstance(source, OpenCheckpoint) else source
    directory = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    files = optimizer_files(directory) if directory else []
    listed = open_directory(directory) if directory and not files else None
    divided = divided_directory(listed) if listed else None
    if divided is not None:
        raise UnsupportedError(f"the directory holds {divided.what}", file=directory, advice=divided.advice)
    with ExitStack() as stack:
        if len(files) < 2:
            yield stack.enter_context(borrow(files[0] if files else source, limits=limits))
            return
        outline = _outline(_unwrapped(optimizer), model)
        lines, fitting = [], []
        for file in files:
            checkpoint = stack.enter_context(borrow(file, limits=limits))
            try:
                find_state(checkpoint.index.tree, outline, key=key, file=file, rename=rename)
            except MismatchError as error:
                lines.append(f"{file}: {' '.join(error.problem.split())}")
            else:
                lines.append(f"{file}: fits")
                fitting.append(checkpoint)
        if len(fitting) != 1:
            text = section("choose one", lines[:SHOWN], lines)
            fit = "several of them fit" if fitting else "none of them fits"
            raise MismatchError(f"the directory holds more than one optimizer, and {fit}\n{text}", file=directory)
        yield fitting[0]


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the state: accelerate's wrapper passes everything on to it, except hooks."""
    inner = getattr(optimizer, "optimizer", None)
    if type(optimizer).__module__ == "accelerate.optimizer" and isinstance(inner, Optimizer):
        return inner
    return optimizer


def _outline(optimizer: Optimizer, model: torch.nn.Module | None) -> OptimizerOutline:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False) if model is not None else ():
        names.setdefault(id(parameter), []).append(name)
    if model is None:
        for group in optimizer.param_groups:
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False):
                names.setdefault(id(parameter), []).append(name)
    return OptimizerOutline(
        groups=tuple(
            tuple(ParameterOutline(names=tuple(names.get(id(p), ())), shape=tuple(p.shape)) for p in group["params"])
            for group in optimizer.param_groups
        ),
        known_shapes=type(optimizer).__module__.startswith("torch.optim"),
        adapts=bool(optimizer._optimizer_load_state_dict_pre_hooks)
        or type(optimizer).load_state_dict is not Optimizer.load_state_dict,
    )


def _refuse_parameters(optimizer: Optimizer, outline: OptimizerOutline, file: str, *, on_meta: bool) -> None:
    """Refuse parameters whose state cannot be a plain tensor beside them.

    Args:
        optimizer: The optimizer.
        outline: Its parameters.
        file: The checkpoint, for messages.
        on_meta: Whether parameters on meta are among them.
    """
    problems = []
    for number, (parameter, one) in enumerate(zip(_parameters(optimizer), outline.parameters, strict=True)):
        name = repr(one.names[0]) if one.names else str(number)
        if getattr(parameter, "_is_flat_param", False):  # the mark by which FSDP itself knows them
            problems.append(
                f"parameter {name} is a flat parameter of FSDP1, which has no name and no shape in a checkpoint: wrap "
                "the model with use_orig_params=True, or use FSDP.optim_state_dict_to_load"
            )
        elif is_traceable_wrapper_subclass(parameter):
            problems.append(f"parameter {name} is a {type(parameter).__qualname__}, whose state is no plain tensor")
        elif on_meta and parameter.is_meta:
            problems.append(f"parameter {name} is on the meta device: load the model first, or pass device=")
    if problems:
        text = section("reasons", problems[:SHOWN], problems)
        raise MismatchError(f"the optimizer cannot be filled\n{text}\nNothing was read", file=file)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


class _Decider:
    """Decides what each tensor of the state becomes: what torch's ``load_state_dict`` would make of it."""

    def __init__(
        self, optimizer: Optimizer, found: MatchedState, outline: OptimizerOutline, device: str | None
    ) -> None:
        self._optimizer = optimizer
        self._found = found
        self._device = device
        # A pre-hook may have another number of parameters in mind: then these are the first guess.
        pairs = zip(
            chain.from_iterable(found.ids), _parameters(optimizer), outline.parameters, strict=not outline.adapts
        )
        self._owners = {one: (parameter, known.names) for one, parameter, known in pairs}
        #: By the id of each leaf.
        self.wishes: dict[int, _Wish] = {}

    def state_dict(self) -> dict[str, object]:
        """Return what the optimizer will get, with leaves of its own for what is not shared with another tensor."""
        groups = [self._group(number) for number in range(len(self._found.ids))]
        group_of = {one: group for group in reversed(groups) for one in group["params"]}
        state = {one: self._owned(one, value, group_of) for one, value in self._found.state.items()}
        rest = {str(n): self._map(value, str(n), None, self._as_in_file) for n, value in self._found.rest.items()}
        return {**rest, "state": state, "param_groups": groups}

    def requests(self, entry: Entry) -> list[Request]:
        """Return what is to be read for a leaf."""
        wish = self.wishes[id(entry)]
        changed = (wish.dtype, wish.device) != (entry.dtype, "cpu")
        requests = component_requests(wish.name, entry, device=wish.device, dtype=wish.dtype)
        # What torch would have converted is a copy; what it would have taken as it is may share memory.
        return [replace(request, alone=changed) for request in requests]

    def _group(self, number: int) -> dict[str, Any]:
        own = self._optimizer.param_groups[number] if number < len(self._optimizer.param_groups) else {}
        options = self._found.options[number]
        if options is None:
            options = {name: value for name, value in own.items() if name != "params"}

        def option(entry: Entry, path: str, _key: object) -> Entry:
            live = own.get(path.rpartition(".")[2])
            where = str(live.device) if isinstance(live, torch.Tensor) and not live.is_meta else "cpu"
            return self._leaf(entry, _Wish(name=path, dtype=entry.dtype, device=where))

        path = f"param_groups.{number}"
        made = {
            name: self._map(_as_live(value, own.get(name)), f"{path}.{name}", name, option)
            for name, value in options.items()
        }
        return {**made, "params": list(self._found.ids[number])}

    def _owned(self, one: object, value: object, group_of: Mapping[object, dict[str, Any]]) -> object:
        if one not in self._owners:
            return self._map(value, f"state.{one}", None, self._as_in_file)
        parameter, names = self._owners[one]
        on_device = bool(group_of[one].get("capturable") or group_of[one].get("fused"))

        def owned(entry: Entry, path: str, key: object) -> Entry:
            return self._leaf(entry, self._choice(entry, path, key, parameter, on_device=on_device))

        return self._map(value, f"state.{names[0] if names else one}", None, owned)

    def _choice(self, entry: Entry, path: str, key: object, parameter: torch.Tensor, *, on_device: bool) -> _Wish:
        """Return what ``Optimizer._process_value_according_to_param_policy`` makes of a tensor."""
        if key == "step" and not on_device:
            return _Wish(name=path, dtype=entry.dtype, device="cpu")
        dtype = entry.dtype
        if key == "step":
            dtype = "float32"
        elif parameter.is_floating_point():
            dtype = dtype_name(parameter.dtype)
        if entry.composite is not None or why_no_cast(entry.dtype, dtype, requires_grad=False):
            dtype = entry.dtype  # torch has the last word on these
        final = str(parameter.device)
        where = self._device or final
        return _Wish(name=path, dtype=dtype, device=where, waits=where != final)

    def _as_in_file(self, entry: Entry, path: str, _key: object) -> Entry:
        return self._leaf(entry, _Wish(name=path, dtype=entry.dtype, device="cpu"))

    def _leaf(self, entry: Entry, wish: _Wish) -> Entry:
        """Return the leaf for an entry: the entry itself where torch would keep two of it one tensor."""
        if (wish.dtype, wish.device, wish.waits) != (entry.dtype, "cpu", False):
            entry = replace(entry)
        self.wishes.setdefault(id(entry), wish)
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


def _as_live(value: object, live: object) -> object:
    """Return a dtype as one: files hold it as text."""
    if isinstance(live, torch.dtype) and isinstance(value, str):
        return getattr(torch, value.removeprefix("torch."), value)
    return value


class _Staying(torch.Tensor):
    """A tensor that ``.to`` gives back as it is: ``load_state_dict`` would move it to its parameter."""

    kept: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.to and isinstance(args[0], cls):
            return args[0].kept
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _staying(leaves: object, tensors: Any, waiting: frozenset[int]) -> Any:
    """Return ``tensors`` with those that wait, by the ids of ``leaves``, as ones that stay where they are."""
    if isinstance(leaves, Entry) and id(leaves) in waiting:
        made = tensors.as_subclass(_Staying)
        made.kept = tensors
        return made
    if isinstance(leaves, dict):
        return {name: _staying(leaf, tensors[name], waiting) for name, leaf in leaves.items()}
    if isinstance(leaves, (list, tuple)):
        return type(leaves)(_staying(leaf, one, waiting) for leaf, one in zip(leaves, tensors, strict=True))
    return tensors
