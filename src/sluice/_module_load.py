"""One load into a module, from its names to its filled tensors; ``_api.load_into`` measures and reports it.

Everything that headers can show is settled before a byte of tensor data is read: names, shapes, dtypes, memory. Then
copies of tied tensors are compared, then the data is read, and only then does a module on meta change. Live tensors
change while they are read; a failure there says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from sluice import _transfer, _tree
from sluice._alternatives import Change, Offer, Replan, check_budget
from sluice._checkpoint import Checkpoint
from sluice._composites import component_requests, with_tensors
from sluice._device_memory import scratch_bytes
from sluice._devices import check_prefixes, choose_placement, other_devices, parse_placement
from sluice._dtypes import ITEM_BYTES, dtype_name
from sluice._engine import Outcome
from sluice._errors import MismatchError, PartialLoadError
from sluice._geometry import contiguous_stride
from sluice._initial_values import initial_values
from sluice._install import Installed, finish_loading, install, install_one
from sluice._layout import Computed
from sluice._load_hooks import follow_loading
from sluice._load_table import Decided
from sluice._matching import Match, match
from sluice._modules import ModuleState, collect
from sluice._options import MemoryLimits, TransferOptions
from sluice._placement import Placement, device_of
from sluice._progress import Progress, byte_progress
from sluice._records import DeviceMemory, Entry, LoadPlan, Request, UnsupportedValue
from sluice._renaming import Rename, rename_entries
from sluice._rules import Rule
from sluice._selection import Selection, select, unwrap
from sluice._slicing import boxes, slice_entry
from sluice._table import TensorRow
from sluice._targets import Targets
from sluice._transfer import Prepared

__all__ = [
    "Done",
    "Job",
    "Wanted",
    "fill",
    "module_changes",
    "plan_module",
    "prepare_entries",
    "prepare_module",
    "same_values",
]

#: The dtype that is offered where a load does not fit: half of float32, with its range.
_SMALLER_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a caller asks for; see ``sluice.load_into``."""

    #: Devices by prefixes of names, or that they are to be chosen.
    placement: Placement | Literal["auto"]
    #: None, ``"auto"`` or the name of a real floating-point dtype.
    dtype: str | None = None
    #: Part of the checkpoint; None finds it.
    key: str | None = None
    #: New names for those of the checkpoint.
    rename: Rename | None = None
    #: What the tensors become before they are matched.
    rules: Sequence[Rule] = ()
    #: Whether missing and unexpected names are errors.
    strict: bool = True
    #: How the bytes are moved.
    options: TransferOptions

    def with_change(self, change: Change) -> Wanted:
        """Return the same with another dtype, device, place or staging."""
        return replace(
            self,
            dtype=change.dtype or self.dtype,
            placement=parse_placement(change.device) if change.device else self.placement,
            options=_transfer.changed(self.options, change),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A load that is decided and checked; nothing was touched yet."""

    #: The module's tensors.
    state: ModuleState
    #: The state dict that was found.
    selection: Selection
    #: Which entries fill which tensors.
    match: Match
    #: How.
    prepared: Prepared
    #: Devices that were asked for, or chosen.
    placement: Placement
    #: Extra state of the module's parts by name: plain values and containers with ``Entry`` leaves.
    extra_state: Mapping[str, object]
    #: What a reader of the report should know, a sentence each.
    notes: tuple[str, ...] = ()

    def decided(self, checkpoint: Checkpoint) -> Decided:
        """Return what the report's table is made from, which holds no tensor."""
        return Decided(
            outline=self.state.outline,
            match=self.match,
            plan=self.prepared.plan,
            placement=self.placement,
            index=checkpoint.index,
            computed=tuple(_computed_row(name, held[0].tensor) for name, held in self.state.unsaved.items()),
        )


def _computed_row(name: str, tensor: torch.Tensor) -> TensorRow:
    return TensorRow(
        name=name,
        file_dtype=None,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        nbytes=tensor.nbytes,
        device=str(tensor.device),
        how="computed",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What ``fill`` did."""

    #: What the engine did.
    outcome: Outcome
    #: What installing did.
    installed: Installed
    #: What became of each accelerator's memory.
    device_memory: tuple[DeviceMemory, ...]
    #: What a reader of the report should know, a sentence each.
    notes: tuple[str, ...]


def prepare_module(model: nn.Module, checkpoint: Checkpoint, wanted: Wanted) -> Job:
    """Decide a load and check all of it; see ``sluice.load_into`` for the errors."""
    job = plan_module(model, checkpoint, wanted)
    memory = wanted.options.memory or MemoryLimits()
    replan, offer = module_changes(model, checkpoint, wanted)
    check_budget(job.prepared.plan, memory, replan, file=checkpoint.path, offer=offer)
    return job


def module_changes(model: nn.Module, checkpoint: Checkpoint, wanted: Wanted) -> tuple[Replan, Offer]:
    """Return what plans the same load with other arguments, and the arguments that could be asked for."""

    def replan(change: Change) -> LoadPlan:
        return plan_module(model, checkpoint, wanted.with_change(change)).prepared.plan

    def offer() -> list[Change]:
        # Where a cast was asked for, the file's own dtypes can be what fits: they can be mapped, or are in place.
        dtypes = (_SMALLER_DTYPE, "auto") if wanted.dtype not in {None, "auto"} else (_SMALLER_DTYPE,)
        return [*_other_places(wanted.placement, wanted.options), *(Change(dtype=dtype) for dtype in dtypes)]

    return replan, offer


def _other_places(placement: Placement | Literal["auto"], options: TransferOptions) -> Iterator[Change]:
    """Yield the changes that leave every value as it is."""
    if options.place == "copy":
        yield Change(place="map")
    for device in other_devices(placement):
        yield Change(device=device)


def plan_module(model: nn.Module, checkpoint: Checkpoint, wanted: Wanted) -> Job:
    """Decide a load and check all of it but the memory limits; nothing is touched."""
    state = collect(model)
    tree = checkpoint.index.tree
    selection = select(
        tree, state.outline, key=wanted.key, rename=wanted.rename, rules=wanted.rules, limits=checkpoint.limits
    )
    _refuse_opaque(tree, selection, state, checkpoint, rename=wanted.rename, strict=wanted.strict)
    followed = follow_loading(model, selection.entries, selection.extra_state, versions=selection.versions)
    matched = partial(
        match,
        state.outline,
        followed.entries,
        dtype=wanted.dtype,
        strict=wanted.strict,
        versions=selection.versions,
        extra_state=followed.extra_state,
        forgiven=followed.forgiven,
        problems=followed.problems,
    )
    placement = wanted.placement
    if placement == "auto":
        placement = choose_placement(state, matched(), wanted.options.memory)
    else:
        check_prefixes(placement, state)
    found = matched(placement=placement)
    extra_state = {
        name: value
        for name, value in followed.extra_state.items()
        if name in state.outline.extra_state and not _tree.opaques(value)
    }
    left_out = [name for name in followed.extra_state if name in state.outline.extra_state and name not in extra_state]
    return Job(
        state=state,
        selection=selection,
        match=found,
        prepared=_transfer.plan_transfer(
            checkpoint,
            found.requests,
            computed=_computed(state, found, placement),
            options=wanted.options,
        ),
        placement=placement,
        extra_state=extra_state,
        notes=tuple(f"extra state {name!r} was left out: only running code could build it" for name in left_out),
    )


def _computed(state: ModuleState, found: Match, placement: Placement) -> list[Computed]:
    """Return the tensors on meta that the checkpoint does not fill, in the order of ``zeroed`` and ``initialised``."""
    slots = state.outline.slots
    return [
        Computed(
            name=slots[slot].names[0],
            shape=slots[slot].shape,
            stride=slots[slot].stride,
            dtype=found.initial_dtypes[slot],
            device=device_of(slots[slot].names[0], placement) or "cpu",
        )
        for slot in (*found.zeroed, *found.initialised)
    ]


def prepare_entries(
    model: nn.Module,
    checkpoint: Checkpoint,
    entries: Mapping[str, Entry],
    *,
    placement: Placement | Literal["auto"],
    options: TransferOptions,
) -> Job:
    """Decide a load of entries that have the module's names already; what they do not fill keeps its values.

    Nothing is searched, and how modules load themselves plays no part: a library has seen to both.
    """
    wanted = Wanted(placement=placement, options=options)
    job = _plan_entries(model, checkpoint, entries, wanted)
    check_budget(
        job.prepared.plan,
        options.memory or MemoryLimits(),
        lambda change: _plan_entries(model, checkpoint, entries, wanted.with_change(change)).prepared.plan,
        file=checkpoint.path,
        offer=lambda: [*_other_places(placement, options)],
    )
    return job


def _plan_entries(model: nn.Module, checkpoint: Checkpoint, entries: Mapping[str, Entry], wanted: Wanted) -> Job:
    state = collect(model)
    matched = partial(match, state.outline, entries, strict=False)
    placement = wanted.placement
    if placement == "auto":
        placement = choose_placement(state, matched(), wanted.options.memory)
    else:
        check_prefixes(placement, state)
    found = matched(placement=placement)
    prepared = _transfer.plan_transfer(checkpoint, found.requests, options=wanted.options)
    selection = Selection(entries=entries, key=None, prefix="", versions={})
    return Job(state=state, selection=selection, match=found, prepared=prepared, placement=placement, extra_state={})


def fill(job: Job, checkpoint: Checkpoint, *, strict: bool, progress: Progress) -> Done:
    """Run a job: compare copies of tied tensors, read, install.

    Raises:
        MismatchError: Tied names have different bytes; nothing was touched.
        PartialLoadError: A failure after live tensors began to change; its cause says what failed.
    """
    notes = [*job.notes, *_compare_tied(job, checkpoint, strict=strict)]
    extra_state = {name: _read_tree(checkpoint, value) for name, value in job.extra_state.items()}
    plan = job.prepared.plan
    targets = Targets(
        plan, {i: job.state.tensors[slot] for i, slot in enumerate(job.match.slots) if job.match.requests[i].existing}
    )
    finished: set[int] = set()
    before = _transfer.allocator_state(plan)
    initial = _initial_values(job, targets)

    def completed(position: int) -> None:
        slot = job.match.slots[position]
        if not job.match.requests[position].existing and not job.state.tensors[slot].is_meta:
            # A live tensor in another dtype or on another device: its old memory goes as soon as the new is whole.
            install_one(job.state, slot, *targets.tensors([job.prepared.views[position]]))
        finished.add(position)

    try:
        with byte_progress(progress, checkpoint.path, plan.read_bytes) as report:
            tensors, outcome = _transfer.run(checkpoint, job.prepared, targets, progress=report, completed=completed)
    except BaseException as error:
        _report_partial(job, targets, finished, error)
        raise
    installed = install(job.state, job.match, tensors, initial, placement=job.placement)
    missing, unexpected = finish_loading(job.state, job.match, extra_state, strict=strict)
    installed = replace(installed, missing=missing, unexpected=unexpected)
    memory = _transfer.device_memory(plan, before)
    return Done(outcome=outcome, installed=installed, device_memory=memory, notes=tuple(notes))


def _initial_values(job: Job, targets: Targets) -> dict[int, torch.Tensor]:
    """Compute what the checkpoint does not have, in its final memory."""
    slots = (*job.match.zeroed, *job.match.initialised)
    if not slots:
        return {}
    try:
        targets.reserve()
        memory = dict(zip(slots, targets.tensors(job.prepared.computed), strict=True))
        scratch = scratch_bytes(job.prepared.plan.staging_buffer_bytes)
        initial_values(job.state, job.match, memory, scratch_bytes=scratch)
    except BaseException:
        targets.discard()
        raise
    return memory


def _read_tree(checkpoint: Checkpoint, tree: object) -> object:
    """Return a part of the checkpoint with its tensors on the host, as ``torch.load`` gives it."""
    entries = list(_tree.every_entry(tree))
    if not entries:
        return tree
    requests = [request for entry in entries for request in component_requests("extra state", entry, device="cpu")]
    prepared = _transfer.prepare(checkpoint, requests, share_storages=True)
    tensors, _ = _transfer.run(checkpoint, prepared, Targets(prepared.plan))
    return with_tensors(tree, entries, tensors, file=checkpoint.path)


def _refuse_opaque(
    tree: object,
    selection: Selection,
    state: ModuleState,
    checkpoint: Checkpoint,
    *,
    rename: Rename | None,
    strict: bool,
) -> None:
    """Refuse what the state dict holds and sluice does not build; without ``strict``, only tensors of the module."""
    own = {unwrap(name) for slot in state.outline.slots for name in slot.names}
    for name, leaf in _tree.opaques(_tree.subtree(tree, selection.key or "")).items():
        for renamed in rename_entries({name: leaf}, rename):
            spellings = [renamed, unwrap(renamed)]
            behind = [one.removeprefix(selection.prefix) for one in spellings if one.startswith(selection.prefix)]
            needed = isinstance(leaf, UnsupportedValue) and any(unwrap(one) in own for one in behind)
            if needed or (strict and behind):
                raise _tree.refusal(leaf, name, checkpoint.path)


def _compare_tied(job: Job, checkpoint: Checkpoint, *, strict: bool) -> list[str]:
    """Compare further copies of tied tensors with the first, slice by slice, before anything is touched."""
    notes = []
    for position, other in job.match.comparisons:
        first = job.match.requests[position]
        if same_values(checkpoint, first, other, limit_bytes=job.prepared.plan.staging_buffer_bytes):
            continue
        problem = f"{first.name!r} and {other.name!r} are tied in the model and differ in the checkpoint"
        if strict:
            raise MismatchError(problem, file=checkpoint.path, tensor=first.name)
        notes.append(f"{problem}; {first.name!r} was used")
    return notes


def same_values(checkpoint: Checkpoint, first: Request, other: Request, *, limit_bytes: int) -> bool:
    """Return whether two tensors of one shape finish with the same bytes, ``limit_bytes`` of each at a time."""
    largest = max(ITEM_BYTES[dtype] for dtype in (first.entry.dtype, other.entry.dtype, first.dtype))
    for key in boxes(first.entry.shape, max(1, limit_bytes // largest)):
        requests = [_part(request, key) for request in (first, other)]
        prepared = _transfer.prepare(checkpoint, requests)
        tensors, _ = _transfer.run(checkpoint, prepared, Targets(prepared.plan))
        one, two = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors)
        if not torch.equal(one, two):
            return False
    return True


def _part(request: Request, key: tuple[slice, ...]) -> Request:
    """Return a request for a box of another one, as a tensor of its own on the host."""
    entry = slice_entry(request.entry, key) if key else request.entry
    return Request(
        name=request.name, entry=entry, dtype=request.dtype, device="cpu", stride=contiguous_stride(entry.shape)
    )


def _report_partial(job: Job, targets: Targets, finished: set[int], error: BaseException) -> None:
    """Say which live tensors changed, when any did; an interrupt stays an interrupt and carries it as a note."""
    names = [job.state.outline.slots[slot].names[0] for slot in job.match.slots]
    live = [i for i, slot in enumerate(job.match.slots) if not job.state.tensors[slot].is_meta]
    done = tuple(names[i] for i in live if i in finished)
    torn = tuple(
        names[i] for i in live if i not in finished and i in targets.touched and job.match.requests[i].existing
    )
    if not done and not torn:
        return
    untouched = tuple(name for name in (names[i] for i in live) if name not in {*done, *torn})
    partial = PartialLoadError(
        f"the load failed after live tensors began to change: {len(done)} done, {len(torn)} torn, "
        f"{len(untouched)} untouched",
        done=done,
        torn=torn,
        untouched=untouched,
    )
    if isinstance(error, Exception):
        raise partial from error
    error.add_note(str(partial))
