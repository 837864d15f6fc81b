"""Rows of the table of a load, from its plan. Pure; no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES
from sluice.entries.tree import walk
from sluice.matching.match import Match, Outline, Slot
from sluice.matching.placement import Placement, device_of
from sluice.records import Entry, Index, LoadPlan, Request
from sluice.reports.table import TensorRow

__all__ = ["Decided", "request_rows", "tensor_rows"]


class Decided(Struct, frozen=True, kw_only=True):
    """The decisions of a load into a module. A report keeps them and builds its table on demand."""

    #: The tensors of the module.
    outline: Outline
    #: Match of checkpoint and module. Its requests correspond to the targets of the plan, in order.
    match: Match
    #: The plan.
    plan: LoadPlan
    #: Requested or chosen devices.
    placement: Placement
    #: The checkpoint.
    index: Index
    #: Rows of non-persistent buffers.
    computed: tuple[TensorRow, ...] = ()


def tensor_rows(decided: Decided) -> tuple[TensorRow, ...]:
    """Return one row per name of the module, in its order; computed buffers are last."""
    fates = {
        **dict.fromkeys(decided.match.kept, "kept"),
        **dict.fromkeys((*decided.match.zeroed, *decided.match.initialised), "initialised"),
    }
    filled = dict(zip(decided.match.slots, range(len(decided.match.slots)), strict=True))
    in_place = {read.into for read in decided.plan.reads}
    names = _SourceNames(decided.index)
    rows: list[TensorRow] = []
    for position, slot in enumerate(decided.outline.slots):
        if position in filled:
            number = filled[position]
            request = decided.match.requests[number]
            how = _how(decided.plan, number, request, in_place)
            row = _filled(slot.names[0], request, how, names.of(request.entry))
        else:
            row = _absent(slot, fates[position], decided, position)
        rows.append(row)
        rows.extend(replace(row, name=other, how=f"tied to {slot.names[0]}") for other in slot.names[1:])
    return (*rows, *decided.computed)


def request_rows(
    requests: Sequence[Request], targets: Sequence[int], plan: LoadPlan, index: Index
) -> tuple[TensorRow, ...]:
    """Return one row per request; ``targets`` has the position of its target in the plan."""
    in_place = {read.into for read in plan.reads}
    names = _SourceNames(index)
    return tuple(
        _filled(request.name, request, _how(plan, target, request, in_place), names.of(request.entry))
        for request, target in zip(requests, targets, strict=True)
    )


def _how(plan: LoadPlan, position: int, request: Request, in_place: set[int | None]) -> str:
    """Return how a target of a plan is filled; ``in_place`` has the targets that reads go into."""
    if plan.blocks[position].kind == "mapped":
        return "mapped"
    if not plan.targets[position].nbytes:
        return "empty"
    if request.dtype != request.entry.dtype:
        return "cast"
    return "direct into place" if position in in_place else "through staging"


def _filled(name: str, request: Request, how: str, source_names: tuple[str, ...]) -> TensorRow:
    entry = request.entry
    return TensorRow(
        name=name,
        file_dtype=entry.dtype,
        dtype=request.dtype,
        shape=entry.shape,
        nbytes=entry.numel * ITEM_BYTES[request.dtype],
        device=request.device,
        how=how,
        source_names=source_names,
        origin=entry.origin,
    )


def _absent(slot: Slot, how: str, decided: Decided, position: int) -> TensorRow:
    dtype = decided.match.initial_dtypes.get(position, slot.dtype)
    return TensorRow(
        name=slot.names[0],
        file_dtype=None,
        dtype=dtype,
        shape=slot.held_shape,
        nbytes=prod(slot.held_shape) * ITEM_BYTES[dtype],
        device=device_of(slot.names[0], decided.placement) or (slot.home if slot.on_meta else slot.device),
        how=how,
    )


class _SourceNames:
    """Names of entries: by identity for entries of the tree, by byte range for parts of them."""

    def __init__(self, index: Index) -> None:
        self._by_entry: dict[int, str] = {}
        self._by_storage: defaultdict[int, dict[str, Entry]] = defaultdict(dict)
        for name, entry in walk(index.tree):
            self._by_entry.setdefault(id(entry), name)
            if not entry.parts:
                self._by_storage[entry.storage][name] = entry

    def of(self, entry: Entry) -> tuple[str, ...]:
        if id(entry) in self._by_entry:
            return (self._by_entry[id(entry)],)
        parts = [part.entry for part in entry.parts] or [entry]
        return tuple(dict.fromkeys(name for part in parts for name in self._of_part(part)))

    def _of_part(self, part: Entry) -> Iterator[str]:
        if id(part) in self._by_entry:
            yield self._by_entry[id(part)]
            return
        start, end = part.byte_span
        for name, entry in self._by_storage[part.storage].items():
            first, last = entry.byte_span
            if first <= start and end <= last:
                yield name
                return
