"""Decide a load into a module: which entries fill which tensors, and how. ``module_fill`` runs the decision.

All that headers can show is settled here, before a byte of tensor data is read: names, shapes, dtypes, memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from msgspec.structs import replace
from torch import nn

from sluice._dtypes import dtype_name
from sluice._errors import MismatchError, PartialLoadError
from sluice._options import MemoryLimits, TransferOptions
from sluice._progress import Progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.dtensors.description import is_dtensor, local_of
from sluice.entries import tree as trees
from sluice.entries.lookup import subtree
from sluice.entries.rules import Rule
from sluice.loading.devices import Device, check_prefixes, other_devices, parse_placement
from sluice.loading.job import Loaded, LoadJob, LoadRequest
from sluice.loading.module_fill import ModuleData, fetch_module, install_module, partial_load
from sluice.matching.match import Match, Outline, match
from sluice.matching.name_fit import unwrap
from sluice.matching.placement import Placement, device_of
from sluice.matching.renaming import Rename, rename_entries
from sluice.matching.selection import Selection, select
from sluice.modules.collect import ModuleState, collect
from sluice.modules.load_hooks import follow_loading
from sluice.modules.moves import describe_moves
from sluice.modules.refused_models import advice_for, refuse_quantized
from sluice.planning.alternatives import Change
from sluice.planning.memory_layout import Computed
from sluice.reading.transfer import changed, plan_transfer
from sluice.records import Entry, UnsupportedValue
from sluice.reports.report_rows import Decided, tensor_rows
from sluice.reports.table import TensorRow

if TYPE_CHECKING:
    from sluice.quantizing.weights import QuantizedWeight
    from sluice.ranks.protocol import Group

__all__ = ["EntriesRequest", "ModuleJob", "ModuleRequest"]

#: The dtype offered if a load does not fit: half the size of float32, with the same range.
_SMALLER_DTYPE = "bfloat16"


class _IntoModule(LoadRequest, frozen=True, kw_only=True):
    """A load into a module, which several ranks may hold."""

    #: The module to load into.
    model: nn.Module

    can_map: ClassVar[bool] = True

    def group(self) -> Group | None:
        """See ``LoadRequest.group``: the ranks of the meshes of its DTensors."""
        if "torch.distributed.fsdp" in sys.modules:  # otherwise no module is divided by it
            from sluice.modules.fully_sharded import reshard

            reshard(self.model)  # a gathered parameter is an ordinary tensor
        tensors = list(chain(self.model.parameters(), self.model.buffers()))
        if not any(map(is_dtensor, tensors)):
            return None
        # Here, not above: most models are those of one process.
        from sluice.ranks.membership import group_of

        return group_of(tensors)

    def process_groups(self) -> Mapping[tuple[int, ...], Any]:
        """See ``LoadRequest.process_groups``."""
        from sluice.ranks.membership import process_groups_of

        return process_groups_of(chain(self.model.parameters(), self.model.buffers()))


class ModuleRequest(_IntoModule, frozen=True, kw_only=True):
    """Arguments of ``sluice.load_into``."""

    #: Device, devices by prefix of names, ``"auto"``, or None. ``job`` resolves it, because that can create a context.
    device: Device = None
    #: Name of a real floating-point dtype, ``"auto"`` for the checkpoint's, or None for the module's.
    dtype: str | None = None
    #: Part of the checkpoint; None searches for the state dict.
    key: str | None = None
    #: New names for the names of the checkpoint.
    rename: Rename | None = None
    #: Rules to apply before names are matched.
    rules: Sequence[Rule] = ()
    #: Whether missing and unexpected names are errors.
    strict: bool = True
    #: Whether it is accepted that no tensor of the module is in the checkpoint.
    allow_empty: bool = False
    #: Quantizes weights; a configuration of torchao, or a function.
    quantize: object = None

    def arguments(self) -> dict[str, str]:
        """See ``LoadRequest.arguments``."""
        return {
            "dtype": str(self.dtype),
            "key": str(self.key),
            "strict": str(self.strict),
            "rename": "a function" if callable(self.rename) else repr(self.rename),
            "rules": ", ".join(type(rule).__name__ for rule in self.rules),
            "place": self.options.place,
            "share": self.share,
        }

    def job(self, checkpoint: OpenCheckpoint) -> ModuleJob:
        """See ``LoadRequest.job``; the errors are those of ``sluice.load_into``."""
        try:
            return self._job(checkpoint)
        except MismatchError as error:
            advice = advice_for(self.model)
            if advice is not None:
                error.advice = f"{error.advice} {advice}"
            raise

    def _job(self, checkpoint: OpenCheckpoint) -> ModuleJob:
        state = self.describe()
        tree, limits = checkpoint.tree_with_ties(_without_entry(state.outline, checkpoint)), checkpoint.limits
        selection = select(tree, state.outline, key=self.key, rename=self.rename, rules=self.rules, limits=limits)
        _refuse_opaques(self, selection, state, checkpoint)
        followed = follow_loading(
            self.model, selection.entries, selection.extra_state, versions=selection.versions, strict=self.strict
        )
        match_on = partial(
            match,
            state.outline,
            followed.entries if self.dtype else _in_own_dtype(followed.entries, followed.assigned),
            dtype=self.dtype,
            strict=followed.strict,
            versions=selection.versions,
            extra_state=followed.extra_state,
            optional_names=followed.optional_names,
            problems=followed.problems,
            allow_empty=self.allow_empty,
            candidates=selection.candidates,
            needs_values=self.strict,
            has_attributes=bool(followed.attributes),
        )
        own = {name: value for name, value in followed.extra_state.items() if name in state.outline.extra_state}
        skipped = [name for name, value in own.items() if trees.opaques(value)]
        job = _module_job(
            checkpoint, state, match_on, self.device, self.options, strict=self.strict, quantize=self.quantize
        )
        return replace(
            job,
            key=selection.key,
            prefix=selection.prefix,
            receivers=followed.receivers,
            attributes=followed.attributes,
            extra_state={name: value for name, value in own.items() if name not in skipped},
            notes=(
                *selection.notes,
                *followed.notes,
                *job.notes,
                *(describe_moves(map(local_of, state.tensors)) if self.device is None else ()),
                *(f"extra state {name!r} was skipped: only running code could build it" for name in skipped),
            ),
        )

    def describe(self) -> ModuleState:
        """Return the description of the module, or of the part of it that is loaded."""
        return collect(self.model)

    def changed(self, change: Change) -> ModuleRequest:
        """See ``LoadRequest.changed``."""
        return replace(
            self,
            dtype=change.dtype or self.dtype,
            device=change.device or self.device,
            options=changed(self.options, change),
        )

    def offers(self) -> Sequence[Change]:
        """See ``LoadRequest.offers``."""
        # If the caller asked for a cast, the file's own dtypes may fit: they can be mapped, or are in place.
        dtypes = (_SMALLER_DTYPE, "auto") if self.dtype not in {None, "auto"} else (_SMALLER_DTYPE,)
        return [*_other_places(self.device, self.options), *(Change(dtype=dtype) for dtype in dtypes)]


class EntriesRequest(_IntoModule, frozen=True, kw_only=True):
    """A load of entries that have the module's names already, because a library converted them.

    Nothing is searched, and load hooks of modules are not followed: the library has handled both. Tensors without an
    entry must be real and keep their values.
    """

    #: The entry of each parameter and persistent buffer, by name.
    entries: Mapping[str, Entry]
    #: As in ``ModuleRequest``.
    device: Device = None
    #: As in ``ModuleRequest``.
    quantize: object = None

    def job(self, checkpoint: OpenCheckpoint) -> ModuleJob:
        """See ``LoadRequest.job``."""
        state = collect(self.model)
        match_on = partial(match, state.outline, self.entries, strict=False, allow_empty=True)
        return _module_job(checkpoint, state, match_on, self.device, self.options, strict=False, quantize=self.quantize)

    def changed(self, change: Change) -> EntriesRequest:
        """See ``LoadRequest.changed``."""
        return replace(self, device=change.device or self.device, options=changed(self.options, change))

    def offers(self) -> Sequence[Change]:
        """See ``LoadRequest.offers``."""
        return list(_other_places(self.device, self.options))


class ModuleJob(LoadJob, frozen=True, kw_only=True):
    """A decided load into a module."""

    #: Tensors of the module.
    state: ModuleState
    #: Entries of these tensors; its requests are the job's.
    match: Match
    #: Whether copies of tied tensors that differ, and names reported by post-hooks, are errors.
    strict: bool
    #: Extra state of modules by name: plain values and containers with ``Entry`` leaves.
    extra_state: Mapping[str, object] = {}
    #: Tensors that become attributes of modules, neither parameters nor buffers, by the attributes' full names.
    attributes: Mapping[str, Entry] = {}
    #: Weights that are quantized, by the positions of their requests.
    quantized: Mapping[int, QuantizedWeight] = {}
    #: Paths of the modules whose load_state_dict post-hooks run.
    receivers: tuple[str, ...] = ("",)

    @property
    def total(self) -> int:
        """See ``LoadJob.total``; parameters and persistent buffers."""
        return len(self.state.outline.slots)

    def part(self, positions: Sequence[int], options: TransferOptions) -> ModuleJob:
        """Return the job that fills only the tensors of some requests, and those that no entry fills.

        Copies of tied tensors are not compared by it.

        Args:
            positions: Positions in ``requests``.
            options: How the bytes are moved.
        """
        requests = tuple(self.requests[i] for i in positions)
        matched = replace(
            self.match, requests=requests, slots=tuple(self.match.slots[i] for i in positions), comparisons=()
        )
        computed = _computed(self.state, self.match, self.placement)
        return replace(
            self,
            requests=requests,
            match=matched,
            prepared=plan_transfer(self.checkpoint, requests, computed=computed, options=options),
        )

    def request_lines(self) -> Iterator[str]:
        """See ``LoadJob.request_lines``: also each name of the model, and the entry that fills it."""
        yield f"{self.key} {self.prefix} {self.missing} {self.unexpected}"
        filled = dict(zip(self.match.slots, self.requests, strict=True))
        for position, slot in enumerate(self.state.outline.slots):
            request = filled.get(position)  # its entry is the part of this rank
            yield f"{slot.names} {slot.shape} {slot.dtype} {request and request.dtype}"

    def fetch(self, progress: Progress) -> ModuleData:
        """See ``LoadJob.fetch``."""
        return fetch_module(self, progress)

    def install(self, fetched: ModuleData) -> Loaded:
        """See ``LoadJob.install``."""
        return install_module(self, fetched)

    def changed_by(self, fetched: ModuleData | None) -> PartialLoadError | None:
        """See ``LoadJob.changed_by``."""
        return None if fetched is None else partial_load(self, fetched.touched, fetched.finished)

    def row_maker(self) -> Callable[[], Iterable[TensorRow]]:
        """See ``LoadJob.row_maker``; one row for each name of the module."""
        decided = Decided(
            outline=self.state.outline,
            match=self.match,
            plan=self.plan,
            placement=self.placement,
            index=self.checkpoint.index,
            computed=tuple(_computed_row(name, held[0].tensor) for name, held in self.state.unsaved.items()),
        )
        return partial(tensor_rows, decided)


def _in_own_dtype(entries: Mapping[str, Entry], assigned: Collection[str]) -> Mapping[str, Entry]:
    """Return the entries, of which those that are assigned keep the dtype of the checkpoint."""
    if not assigned:
        return entries
    return {
        name: replace(entry, cast=entry.cast or entry.dtype) if name in assigned else entry
        for name, entry in entries.items()
    }


def _computed_row(name: str, tensor: torch.Tensor) -> TensorRow:
    tensor = local_of(tensor)
    return TensorRow(
        name=name,
        file_dtype=None,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        nbytes=tensor.nbytes,
        device=str(tensor.device),
        how="computed",
    )


def _other_places(device: Device, options: TransferOptions) -> Iterator[Change]:
    """Yield the changes that keep every value."""
    if options.place == "copy":
        yield Change(place="map")
    for other in other_devices(parse_placement(device)):
        yield Change(device=other)


def _module_job(
    checkpoint: OpenCheckpoint,
    state: ModuleState,
    match_on: Callable[..., Match],
    device: Device,
    options: TransferOptions,
    *,
    strict: bool,
    quantize: object = None,
) -> ModuleJob:
    """Return the job of a match; ``match_on`` is ``match`` with everything but the placement."""
    matched, placement = _placed(state, match_on, device, options.memory)
    quantized: Mapping[int, QuantizedWeight] = {}
    if quantize is not None:
        # Here, not above: most loads do not quantize.
        from sluice.loading.quantized import quantized_weights, with_finishers

        quantized = quantized_weights(state, matched, quantize)
        matched = with_finishers(matched, quantized)
    slots = state.outline.slots
    later_copies: list[tuple[int, int]] = []
    # A plan for ranks divides the description of a model of whole tensors.
    if any(slot.region is not None and is_dtensor(state.tensors[i]) for i, slot in enumerate(slots)):
        # Here, not above: most models hold whole tensors.
        from sluice.dtensors.local_ranks import local_rank_count
        from sluice.loading.divided_tensors import check_devices, padding_copies

        check_devices(state, matched)
        options = replace(options, host_ranks=options.host_ranks or local_rank_count())
        later_copies = list(padding_copies(state, matched))
    refuse_quantized(
        (slots[slot].names[0], state.tensors[slot], request.entry.dtype)
        for slot, request in zip(matched.slots, matched.requests, strict=True)
    )
    prepared = plan_transfer(
        checkpoint,
        matched.requests,
        computed=_computed(state, matched, placement),
        later_copies=later_copies,
        options=options,
    )
    notes: tuple[str, ...] = ()
    if quantized:
        from sluice.loading.quantized import describe_quantized, with_transient

        prepared, notes = with_transient(prepared, quantized), (describe_quantized(quantized),)
    return ModuleJob(
        checkpoint=checkpoint,
        requests=matched.requests,
        prepared=prepared,
        quantized=quantized,
        notes=notes,
        placement=placement,
        missing=matched.missing,
        unexpected=matched.unexpected,
        tied=matched.tied,
        initialised=tuple(name for slot in matched.initialised for name in slots[slot].names),
        state=state,
        match=matched,
        strict=strict,
    )


def _placed(
    state: ModuleState, match_on: Callable[..., Match], device: Device, memory: MemoryLimits | None
) -> tuple[Match, Placement]:
    """Return the match on the requested devices, and these devices; choose them for ``"auto"``."""
    placement = parse_placement(device)
    if placement == "auto":
        # Here, not above: most loads name their devices.
        from sluice.loading.auto_devices import choose_placement

        placement = choose_placement(state, match_on(), memory)
    else:
        check_prefixes(placement, state)
    return match_on(placement=placement), placement


def _computed(state: ModuleState, matched: Match, placement: Placement) -> list[Computed]:
    """Return the tensors on meta that the checkpoint does not fill, in the order of ``zeroed`` and ``initialised``."""
    slots = state.outline.slots
    return [
        Computed(
            name=slots[slot].names[0],
            shape=slots[slot].held_shape,
            stride=slots[slot].stride,
            dtype=matched.initial_dtypes[slot],
            device=device_of(slots[slot].names[0], placement) or slots[slot].home,
        )
        for slot in (*matched.zeroed, *matched.initialised)
    ]


def _without_entry(outline: Outline, checkpoint: OpenCheckpoint) -> set[str]:
    """Return the names that the module has, and the checkpoint only in metadata that may name tied tensors."""
    ties = checkpoint.stored_names
    if not ties:
        return set()
    slots = (slot.names for slot in outline.slots if not any(name in checkpoint.entries for name in slot.names))
    return {name for names in slots for name in names if name in ties}


def _refuse_opaques(
    request: ModuleRequest, selection: Selection, state: ModuleState, checkpoint: OpenCheckpoint
) -> None:
    """Refuse values of the state dict that sluice does not build; without ``strict``, only tensors of the module."""
    opaques = trees.opaques(subtree(checkpoint.index.tree, selection.key or ""))
    own = {unwrap(name) for slot in state.outline.slots for name in slot.names} if opaques else set()
    for name, leaf in opaques.items():
        for new_name in rename_entries({name: leaf}, request.rename):
            spellings = [new_name, unwrap(new_name)]
            rests = [each.removeprefix(selection.prefix) for each in spellings if each.startswith(selection.prefix)]
            needed = isinstance(leaf, UnsupportedValue) and any(unwrap(rest) in own for rest in rests)
            if needed or (request.strict and rests):
                raise trees.refusal(leaf, name, checkpoint.path)
