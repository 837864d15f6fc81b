"""Decide and run a load into an optimizer: from its parameters to its state.

Each tensor is read to the device and in the dtype that ``Optimizer.load_state_dict`` would choose. That method gets
the finished tensors at the end and has nothing left to move or cast: it merges the groups and runs hooks,
``__setstate__`` and the overrides of subclasses. Until then the optimizer is untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
from msgspec.structs import replace
from torch.optim import Optimizer

from sluice._arguments import device_name
from sluice._errors import MismatchError, UnsupportedError
from sluice._messages import SHOWN, section
from sluice._options import DEFAULT_LIMITS, TEXT_ENCODING, Limits
from sluice._private_torch import is_traceable_wrapper_subclass
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, borrow
from sluice.checkpoint.survey import optimizer_files
from sluice.checkpoint.zero_files import zero_layout
from sluice.engine.running_plan import RunResult
from sluice.entries.tree import every_entry, refuse_opaques
from sluice.formats.divided import divided_directory
from sluice.loading.job import Loaded, LoadJob, LoadRequest
from sluice.loading.optimizer_leaves import LeafDecisions, as_dtensor, keep_device, move_at_first_step
from sluice.matching.optimizer_states import MatchedState, OptimizerOutline, ParameterOutline, find_state
from sluice.matching.renaming import Rename
from sluice.ranks.membership import local_rank_count
from sluice.reading.composites import with_tensors
from sluice.reading.transfer import plan_transfer
from sluice.records import Entry
from sluice.reports.load import Subject
from sluice.sharding.dtensors import UndescribedError, is_dtensor, region_held, reshard
from sluice.sources.opening import find_place

__all__ = ["OptimizerJob", "OptimizerRequest", "optimizer_checkpoint"]

# torch documents the hooks of optimizers, but their dicts are private and have no public accessor.
# ruff: noqa: SLF001


class OptimizerRequest(LoadRequest, frozen=True, kw_only=True):
    """Arguments of ``sluice.load_optimizer``."""

    #: The optimizer to load into, or accelerate's wrapper of it.
    optimizer: Optimizer
    #: Module that names the parameters; None takes the names that the optimizer knows.
    model: torch.nn.Module | None = None
    #: Part of the checkpoint; None searches for the state.
    key: str | None = None
    #: New names for the parameters of the checkpoint.
    rename: Rename | None = None
    #: Device of the state until the first step; None for the devices of the parameters.
    device: str | int | torch.device | None = None

    verb: ClassVar[str] = "load_optimizer"

    def arguments(self) -> dict[str, str]:
        """See ``LoadRequest.arguments``."""
        rename = "a function" if callable(self.rename) else repr(self.rename)
        return {"key": str(self.key), "rename": rename}  # each rank has a device of its own

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``LoadRequest.tensors``: its parameters."""
        optimizer = _unwrapped(self.optimizer)
        return chain.from_iterable(group["params"] for group in optimizer.param_groups)

    def job(self, checkpoint: OpenCheckpoint) -> OptimizerJob:
        """See ``LoadRequest.job``; the errors are those of ``sluice.load_optimizer``."""
        device = None if self.device is None else device_name(self.device)
        optimizer, outline = _unwrapped(self.optimizer), self.outline()
        _refuse_parameters(optimizer, outline, checkpoint.path, device)
        matched = self.find(checkpoint, outline)
        decisions = LeafDecisions(optimizer, matched, outline, device)
        state_dict = decisions.state_dict()
        refuse_opaques(state_dict, checkpoint.path)
        entries = tuple(every_entry(state_dict))
        requests = tuple(chain.from_iterable(decisions.requests(entry) for entry in entries))
        options = self.options
        if decisions.divided:
            options = replace(options, host_ranks=options.host_ranks or local_rank_count())
        return OptimizerJob(
            checkpoint=checkpoint,
            requests=requests,
            prepared=plan_transfer(checkpoint, requests, share_storages=True, options=options),
            key=matched.key,
            unexpected=matched.unexpected,
            notes=matched.notes,
            optimizer=optimizer,
            state_dict=state_dict,
            entries=entries,
            deferred=decisions.deferred,
            divided=decisions.divided,
            state_tensors=(matched.used, matched.saved),
        )

    def find(self, checkpoint: OpenCheckpoint, outline: OptimizerOutline) -> MatchedState:
        """Return the state of the optimizer in a checkpoint.

        Raises:
            MismatchError: There is no state, none fits, or more than one fits.
        """
        return find_state(checkpoint.index.tree, outline, key=self.key, file=checkpoint.path, rename=self.rename)

    def outline(self) -> OptimizerOutline:
        """Return the description of the optimizer's parameters for matching."""
        if self.model is not None:
            reshard(self.model)  # the optimizer has the parameters that fully_shard divided
        return _outline(_unwrapped(self.optimizer), self.model)


class OptimizerJob(LoadJob, frozen=True, kw_only=True):
    """A decided load into an optimizer."""

    #: The optimizer that holds the state.
    optimizer: Optimizer
    #: Argument of its ``load_state_dict``, with ``Entry`` leaves.
    state_dict: Mapping[str, object]
    #: The leaves, each once; ``requests`` are for their components.
    entries: tuple[Entry, ...]
    #: ids of leaves kept on another device until the first step.
    deferred: frozenset[int]
    #: Parameters that are divided over ranks, by the ids of leaves that are parts of their state.
    divided: Mapping[int, torch.Tensor]
    #: Tensors of the state that belong to a parameter of the optimizer, and all of them.
    state_tensors: tuple[int, int]

    subject: ClassVar[Subject] = "optimizer state"

    @property
    def loaded(self) -> int:
        """See ``LoadJob.loaded``; a tensor of several parameters counts for each."""
        return self.state_tensors[0]

    @property
    def total(self) -> int:
        """See ``LoadJob.total``: the tensors of the state in the checkpoint."""
        return self.state_tensors[1]

    def install(self, fetched: tuple[list[torch.Tensor], RunResult]) -> Loaded:
        """See ``LoadJob.install``.

        Raises:
            MismatchError: The optimizer, or one of its hooks, refuses the state.
        """
        file = self.checkpoint.path
        tensors, result = fetched
        state_dict = with_tensors(self.state_dict, self.entries, tensors, file=file, finish=self._finished)
        before = dict(vars(self.optimizer))
        try:
            self.optimizer.load_state_dict(state_dict)
        except BaseException as error:  # hooks and subclasses may raise anything
            vars(self.optimizer).update(before)
            if not isinstance(error, Exception):
                raise
            where = type(self.optimizer).__name__
            problem = f"load_state_dict of {where} raised {type(error).__name__}: {error}; the optimizer is unchanged"
            raise MismatchError(problem, file=file) from error
        if self.deferred:
            move_at_first_step(self.optimizer)
        return Loaded(result=result, unexpected=self.unexpected)

    def _finished(self, entry: Entry, tensor: Any) -> Any:
        if (parameter := self.divided.get(id(entry))) is not None:
            return as_dtensor(tensor, parameter)
        return keep_device(tensor) if id(entry) in self.deferred else tensor


def _unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer that holds the state; accelerate's wrapper forwards everything to it except hooks."""
    inner: Optimizer = optimizer.optimizer if type(optimizer).__module__ == "accelerate.optimizer" else optimizer
    return inner


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
        kind=type(optimizer).__name__ if type(optimizer).__module__.startswith("torch.optim") else None,
        needed_options=_needed_options(optimizer),
        adapts=bool(optimizer._optimizer_load_state_dict_pre_hooks)
        or type(optimizer).load_state_dict is not Optimizer.load_state_dict,
    )


def _needed_options(optimizer: Optimizer) -> frozenset[str]:
    """Return the options that ``__setstate__`` of one of torch's own optimizers does not add to old groups."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return frozenset()
    kind = type(optimizer)
    empty = kind.__new__(kind)
    empty.__setstate__({"defaults": {}, "state": {}, "param_groups": [{"params": []}]})
    return frozenset(optimizer.defaults.keys() - empty.param_groups[0].keys())


def _refuse_parameters(optimizer: Optimizer, outline: OptimizerOutline, file: str, device: str | None) -> None:
    """Refuse parameters whose state cannot be a tensor, or a part of one, on their device.

    Args:
        optimizer: The optimizer.
        outline: Its parameters.
        file: The checkpoint, for messages.
        device: Device of the state until the first step; None for the devices of the parameters.
    """
    problems = []
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, (parameter, known) in enumerate(zip(parameters, outline.parameters, strict=True)):
        name = repr(known.names[0]) if known.names else str(number)
        if getattr(parameter, "_is_flat_param", False):  # FSDP itself recognizes them by it
            problems.append(
                f"parameter {name} is a flat parameter of FSDP1, which has no name and no shape in a checkpoint: wrap "
                "the model with use_orig_params=True, or use FSDP.optim_state_dict_to_load"
            )
        elif is_dtensor(parameter):
            problems += [f"parameter {name} {problem}" for problem in _problems_of_dtensor(parameter, device)]
        elif is_traceable_wrapper_subclass(parameter):
            problems.append(f"parameter {name} is a {type(parameter).__qualname__}, whose state is not a plain tensor")
        elif device is None and parameter.is_meta:
            problems.append(f"parameter {name} is on the meta device: load the model first, or pass device=")
    if problems:
        text = section("reasons", problems[:SHOWN], problems)
        raise MismatchError(f"the optimizer cannot be filled\n{text}\nNothing was read", file=file)


def _problems_of_dtensor(parameter: torch.Tensor, device: str | None) -> Iterator[str]:
    """Yield why the state of a parameter that is divided over ranks cannot be loaded."""
    try:
        region_held(parameter)
    except UndescribedError as error:
        yield f"is {error}"
    if parameter.is_meta:
        yield "is on the meta device: load the model first"
    elif device not in {None, str(parameter.device)}:
        yield f"is divided over ranks (DTensor), and its state can only be on {parameter.device}: omit device="


@contextmanager
def optimizer_checkpoint(
    request: OptimizerRequest, source: CheckpointSource, *, limits: Limits | None = None, encoding: str = TEXT_ENCODING
) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint of an optimizer for the length of the block.

    In a directory this is the optimizer's file next to the model; of several such files, the only one that fits.

    Args:
        request: The load, which decides which file fits.
        source: As in ``sluice.load_optimizer``.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote.

    Raises:
        MismatchError: The directory holds the state of several optimizers, and none or more than one of them fits.
        UnsupportedError: It holds a state that was divided over ranks.
    """
    place = source.place if isinstance(source, OpenCheckpoint) else find_place(source)
    listed = place.directory() if place is not None and place.location else None
    names = optimizer_files(listed) if listed else []
    if listed and not names:
        limits, found = limits or DEFAULT_LIMITS, {entry.name for entry in listed.entries()}
        zero = zero_layout(listed, found, limits, optimizer=True)
        if zero is not None:
            with OpenCheckpoint.of_layout(replace(zero, place=place), limits, encoding) as checkpoint:
                yield checkpoint
            return
    divided = divided_directory(listed) if listed and not names else None
    directory = place.title if place else ""
    files = [place.below(name) for name in names] if place else []
    if divided is not None:
        raise UnsupportedError(f"the directory holds {divided.what}", file=directory, advice=divided.advice)
    with ExitStack() as stack:
        if len(files) < 2:
            yield stack.enter_context(borrow(files[0] if files else source, limits=limits, encoding=encoding))
            return
        outline = request.outline()
        lines, fitting = [], []
        for file in files:
            checkpoint = stack.enter_context(borrow(file, limits=limits, encoding=encoding))
            try:
                request.find(checkpoint, outline)
            except MismatchError as error:
                lines.append(f"{find_place(file).title}: {' '.join(error.problem.split())}")
            else:
                lines.append(f"{find_place(file).title}: fits")
                fitting.append(checkpoint)
        if len(fitting) != 1:
            text = section("choose one", lines[:SHOWN], lines)
            fit = "several of them fit" if fitting else "none of them fits"
            raise MismatchError(f"the directory holds more than one optimizer, and {fit}\n{text}", file=directory)
        yield fitting[0]
