"""Decides one load into a module: which entries fill which tensors, and how; ``_module_load`` does it.

Everything that headers can show is settled here, before a byte of tensor data is read: names, shapes, dtypes, memory.
``sluice.plan`` stops here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from sluice._dtypes import dtype_name
from sluice._options import MemoryLimits, TransferOptions
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries import tree as _tree
from sluice.entries.lookup import subtree
from sluice.loading.devices import check_prefixes, choose_placement, other_devices, parse_placement
from sluice.matching.match import Match, match
from sluice.matching.name_fit import unwrap
from sluice.matching.placement import Placement, device_of
from sluice.matching.renaming import Rename, rename_entries
from sluice.matching.selection import Selection, select
from sluice.modules.collect import ModuleState, collect
from sluice.modules.load_hooks import follow_loading
from sluice.planning.alternatives import Change, Offer, Replan, check_budget
from sluice.planning.memory_layout import Computed
from sluice.reading import transfer as _transfer
from sluice.reading.transfer import Prepared
from sluice.records import Entry, LoadPlan, UnsupportedValue
from sluice.reports.report_rows import Decided
from sluice.reports.table import TensorRow
from sluice.rules._apply import Rule

__all__ = ["Job", "Wanted", "module_changes", "plan_module", "prepare_entries", "prepare_module"]

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

    def decided(self, checkpoint: OpenCheckpoint) -> Decided:
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


def prepare_module(model: nn.Module, checkpoint: OpenCheckpoint, wanted: Wanted) -> Job:
    """Decide a load and check all of it; see ``sluice.load_into`` for the errors."""
    job = plan_module(model, checkpoint, wanted)
    memory = wanted.options.memory or MemoryLimits()
    replan, offer = module_changes(model, checkpoint, wanted)
    check_budget(job.prepared.plan, memory, replan, file=checkpoint.path, offer=offer)
    return job


def module_changes(model: nn.Module, checkpoint: OpenCheckpoint, wanted: Wanted) -> tuple[Replan, Offer]:
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


def plan_module(model: nn.Module, checkpoint: OpenCheckpoint, wanted: Wanted) -> Job:
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
    found, placement = _placed(state, matched, wanted)
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


def _placed(state: ModuleState, matched: Callable[..., Match], wanted: Wanted) -> tuple[Match, Placement]:
    """Return how entries and tensors match on the devices that were asked for, and these devices.

    Args:
        state: The module's tensors.
        matched: ``match`` with all but the placement.
        wanted: What the caller asks for.
    """
    if wanted.placement == "auto":
        placement = choose_placement(state, matched(), wanted.options.memory)
    else:
        placement = wanted.placement
        check_prefixes(placement, state)
    return matched(placement=placement), placement


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
    checkpoint: OpenCheckpoint,
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


def _plan_entries(model: nn.Module, checkpoint: OpenCheckpoint, entries: Mapping[str, Entry], wanted: Wanted) -> Job:
    state = collect(model)
    matched = partial(match, state.outline, entries, strict=False)
    found, placement = _placed(state, matched, wanted)
    prepared = _transfer.plan_transfer(checkpoint, found.requests, options=wanted.options)
    selection = Selection(entries=entries, key=None, prefix="", versions={})
    return Job(state=state, selection=selection, match=found, prepared=prepared, placement=placement, extra_state={})


def _refuse_opaque(
    tree: object,
    selection: Selection,
    state: ModuleState,
    checkpoint: OpenCheckpoint,
    *,
    rename: Rename | None,
    strict: bool,
) -> None:
    """Refuse what the state dict holds and sluice does not build; without ``strict``, only tensors of the module."""
    own = {unwrap(name) for slot in state.outline.slots for name in slot.names}
    for name, leaf in _tree.opaques(subtree(tree, selection.key or "")).items():
        for renamed in rename_entries({name: leaf}, rename):
            spellings = [renamed, unwrap(renamed)]
            behind = [one.removeprefix(selection.prefix) for one in spellings if one.startswith(selection.prefix)]
            needed = isinstance(leaf, UnsupportedValue) and any(unwrap(one) in own for one in behind)
            if needed or (strict and behind):
                raise _tree.refusal(leaf, name, checkpoint.path)
