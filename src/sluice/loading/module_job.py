"""A decided load into a module: which entries fill which tensors, and how. ``module_fill`` runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES, dtype_name
from sluice._errors import MismatchError, PartialLoadError
from sluice._options import MemoryLimits, TransferOptions
from sluice._progress import Progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.patterns import Placement, device_of
from sluice.entries.tree import every_entry
from sluice.loading.devices import Device, check_prefixes, choose_placement, parse_placement
from sluice.loading.job import Loaded, LoadJob
from sluice.loading.module_fill import ModuleData, fetch_module, finish_module, install_tensors, partial_load
from sluice.matching.match import Match
from sluice.modules.collect import Holding, ModuleState
from sluice.modules.refused_models import refuse_quantized
from sluice.ranks.membership import local_rank_count
from sluice.reading.transfer import Prepared, plan_transfer, with_more
from sluice.records import NO_STORAGE, Entry, Index, Request, row_major
from sluice.records.geometry import is_dense
from sluice.reports.load import RefreshState
from sluice.reports.table import TensorRow, tensor_rows
from sluice.sharding.dtensors import home, local_of

if TYPE_CHECKING:
    from sluice.adapters.opening import AdaptedCheckpoint
    from sluice.loading.module_request import IntoModule
    from sluice.quantizing.weights import QuantizedWeight

__all__ = ["ModuleJob", "module_job"]


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
        computed = list(_computed(self.state, self.match, self.placement))
        prepared = plan_transfer(self.checkpoint, requests, computed=computed, options=options)
        return replace(self, requests=requests, match=matched, prepared=self.with_values(prepared))

    def with_values(self, prepared: Prepared) -> Prepared:
        """Return a plan with the memory of extra state and attributes, which no request reads."""
        more = sum(each.nbytes for each in every_entry([*self.extra_state.values(), *self.attributes.values()]))
        return with_more(prepared, {"cpu": more}) if more else prepared

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
        """See ``LoadJob.install``; the load hooks of modules run last."""
        replaced = install_tensors(self, fetched)
        missing, unexpected = finish_module(self, fetched)
        return Loaded(
            result=fetched.result, missing=missing, unexpected=unexpected, replaced=replaced, notes=fetched.notes
        )

    def changed_by(self, fetched: ModuleData | None) -> PartialLoadError | None:
        """See ``LoadJob.changed_by``."""
        return None if fetched is None else partial_load(self, fetched.touched, fetched.finished)

    def state_maker(self) -> Callable[[], RefreshState]:
        """See ``LoadJob.state_maker``."""
        return partial(_state, self.checkpoint.index, self.requests, self.match.comparisons)

    def row_maker(self) -> Callable[[], Iterable[TensorRow]]:
        """See ``LoadJob.row_maker``; one row for each name of the module."""
        decided = self.state.outline, self.match, self.plan, self.placement, self.checkpoint.index
        return partial(tensor_rows, *decided, list(starmap(_computed_row, self.state.unsaved.items())))


def module_job(
    checkpoint: OpenCheckpoint, state: ModuleState, match_on: Callable[..., Match], request: IntoModule, *, strict: bool
) -> ModuleJob:
    """Return the job of a match; ``match_on`` is ``match`` with everything but the placement."""
    placement = {} if request.device is None else _placement(state, match_on, request.device, request.options.memory)
    matched = match_on(placement=placement)
    merged: AdaptedCheckpoint | None = None
    if request.adapters:
        from sluice.adapters.opening import adapted  # here, not above: most loads merge nothing

        merged, matched = adapted(checkpoint, state, matched, request.adapters)
        checkpoint = merged.checkpoint
    quantized = None
    if request.quantize is not None:
        from sluice.loading.quantized import quantized as find_quantized  # here, not above: most loads do not quantize

        quantized = find_quantized(state, matched, request.quantize)
        state, matched = quantized.state, quantized.match
    prepared = _planned(checkpoint, state, matched, placement, request.options)
    if quantized is not None:
        prepared = quantized.predicted(prepared)
    return ModuleJob(
        checkpoint=checkpoint,
        requests=matched.requests,
        prepared=prepared,
        quantized={} if quantized is None else quantized.weights,
        notes=() if quantized is None else quantized.notes,
        adapters=() if merged is None else merged.adapters,
        placement=placement,
        missing=matched.missing,
        unexpected=matched.unexpected,
        mismatched=matched.mismatched,
        tied=matched.tied,
        initialised=tuple(name for slot in matched.initialised for name in state.outline.slots[slot].names),
        state=state,
        match=matched,
        strict=strict,
    )


def _planned(
    checkpoint: OpenCheckpoint, state: ModuleState, matched: Match, placement: Placement, options: TransferOptions
) -> Prepared:
    """Return the plan of a match; ranks of one host share its memory, and FSDP's last shards are copied later."""
    later_copies: list[tuple[int, int]] = []
    if state.divided:
        _check_devices(state, matched)
        options = replace(options, host_ranks=options.host_ranks or local_rank_count())
        later_copies = list(_padding_copies(state, matched))
    if "bitsandbytes" in sys.modules:  # nothing is looked at in the usual case
        refuse_quantized(
            (state.outline.slots[slot].names[0], state.tensors[slot], each.entry.dtype)
            for slot, each in zip(matched.slots, matched.requests, strict=True)
        )
    return plan_transfer(
        checkpoint,
        matched.requests,
        computed=list(_computed(state, matched, placement)) if matched.initial_dtypes else (),
        later_copies=later_copies,
        options=options,
    )


def _check_devices(state: ModuleState, matched: Match) -> None:
    """Refuse devices on which the mesh of a DTensor, which is divided over ranks, could not use it.

    Raises:
        MismatchError: There are such tensors.
    """
    for slot, request in zip(matched.slots, matched.requests, strict=True):
        if state.outline.slots[slot].region is None:
            continue
        own = home(state.tensors[slot])
        if request.device not in {own, "cpu"}:
            raise MismatchError(
                f"{request.name!r} is divided over a mesh whose part for this rank is on {own}, not on "
                f"{request.device}: call load_into without device=",
                tensor=request.name,
            )


def _padding_copies(state: ModuleState, matched: Match) -> Iterator[tuple[int, int]]:
    """Yield the bytes of local tensors that fully_shard copies after the load, and of their copies."""
    for slot, request in zip(matched.slots, matched.requests, strict=True):
        shard = state.shards.get(slot)
        if shard is None or request.existing or request.device != "cpu":
            continue
        nbytes, padded = (n * ITEM_BYTES[request.dtype] for n in (request.entry.numel, shard.elements))
        if shard.pinned:
            yield nbytes, 1 << max(padded - 1, 0).bit_length()  # torch rounds page-locked memory up to a power of two
        elif padded != nbytes:
            yield nbytes, padded


def _state(index: Index, requests: Sequence[Request], copies: Sequence[tuple[int, Request]]) -> RefreshState:
    # Here, not above: few loads are refreshed.
    from sluice.loading.contents import request_contents, version_of

    contents = request_contents(index, [*requests, *(other for _, other in copies)])
    return RefreshState(version=version_of(index, contents), contents=contents, unchanged=len(requests))


def _placement(
    state: ModuleState, match_on: Callable[..., Match], device: Device, memory: MemoryLimits | None
) -> Placement:
    """Return the devices as requested; choose them for ``"auto"``."""
    placement = parse_placement(device)
    if placement == "auto":
        return choose_placement(state, match_on(), memory)
    check_prefixes(placement, state)
    return placement


def _computed(state: ModuleState, matched: Match, placement: Placement) -> Iterator[Request]:
    """Yield the tensors on meta that the checkpoint does not fill, in the order of ``zeroed`` and ``initialised``."""
    for position in (*matched.zeroed, *matched.initialised):
        slot = state.outline.slots[position]
        entry = row_major(matched.initial_dtypes[position], slot.held_shape, NO_STORAGE)
        yield Request(
            name=slot.names[0],
            entry=entry,
            stride=slot.stride if is_dense(entry.shape, slot.stride) else entry.stride,
            dtype=entry.dtype,
            device=device_of(slot.names[0], placement) or slot.home,
        )


def _computed_row(name: str, holdings: Sequence[Holding]) -> TensorRow:
    tensor = local_of(holdings[0].tensor)
    return TensorRow(
        name=name,
        file_dtype=None,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        nbytes=tensor.nbytes,
        device=str(tensor.device),
        how="computed",
    )
