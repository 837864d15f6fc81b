"""The table of a load, from its plan: how each tensor was filled, one row per name, cheap for 100,000 tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, overload

from msgspec import Struct
from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES
from sluice._units import format_bytes
from sluice.entries.patterns import Placement, device_of
from sluice.entries.tree import walk
from sluice.matching.match import Match, Outline, Slot
from sluice.records import Entry, Index, LoadPlan, Request
from sluice.reports.document import Grid, Report, Section, plain

__all__ = ["TensorRow", "TensorTable", "request_rows", "tensor_rows"]

_HEADERS = ("name", "dtype", "shape", ">bytes", "device", "how", "from")


class TensorRow(Struct, frozen=True, kw_only=True):
    """How one tensor of the model was filled."""

    #: Its name in the model.
    name: str
    #: Dtype in the checkpoint; None for a tensor that is not in the checkpoint.
    file_dtype: str | None
    #: Dtype of the finished tensor.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Bytes of the finished tensor; tied names repeat it, though they share the memory.
    nbytes: int
    #: Device of the finished tensor, as torch writes it.
    device: str
    #: ``direct into place``: read into its final memory. ``through staging``: copied out of a staging buffer.
    #: ``cast``: cast on the way. ``mapped``: pages of the file. ``kept``: not read, unchanged.
    #: ``initialised``: not in the checkpoint, filled by its module. ``computed``: a non-persistent buffer.
    #: ``tied to ...``: another name of that tensor. ``empty``: no elements.
    how: str
    #: Names in the checkpoint of the tensors that it comes from.
    source_names: tuple[str, ...] = ()
    #: How rules produced it, in words; empty if no rule applied.
    origin: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row as text."""
        dtype = self.dtype if self.file_dtype in {None, self.dtype} else f"{self.file_dtype} -> {self.dtype}"
        origin = self.origin or ", ".join(self.source_names)
        return self.name, dtype, str(list(self.shape)), format_bytes(self.nbytes), self.device, self.how, origin


class TensorTable(Report, Sequence[TensorRow]):
    """Rows in the order of the model. ``str(table)`` is aligned text; rich prints it as a table.

    Example:
        >>> row = TensorRow(name="bias", file_dtype="float32", dtype="bfloat16", shape=(3,), nbytes=6, device="cpu",
        ...                 how="cast", source_names=("module.bias",))
        >>> print(TensorTable([row]))
        name  dtype                shape  bytes  device  how   from
        bias  float32 -> bfloat16  [3]      6 B  cpu     cast  module.bias
    """

    def __init__(self, rows: Iterable[TensorRow]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> TensorRow: ...

    @overload
    def __getitem__(self, index: slice) -> TensorTable: ...

    def __getitem__(self, index: int | slice) -> TensorRow | TensorTable:
        return TensorTable(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def to_json(self) -> Any:
        """Return the rows as plain values that ``json.dumps`` takes."""
        return [plain(row) for row in self._rows]

    def sections(self) -> Iterator[Section]:
        """Yield the table as it is printed by the command line."""
        yield Grid(_HEADERS, [row.cells() for row in self._rows])

    def __repr__(self) -> str:
        return f"<TensorTable of {len(self)} rows>"


def tensor_rows(
    outline: Outline, match: Match, plan: LoadPlan, placement: Placement, index: Index, computed: Iterable[TensorRow]
) -> Iterator[TensorRow]:
    """Yield one row per name of a module, in its order; the requests of its match are those of the plan, in order.

    Rows of ``computed`` buffers are last.
    """
    fates = dict.fromkeys((*match.zeroed, *match.initialised), "initialised")
    filled = {slot: number for number, slot in enumerate(match.slots)}
    in_place = {read.into for read in plan.reads}
    names = _SourceNames(index)
    for position, slot in enumerate(outline.slots):
        number = filled.get(position)
        if number is not None:
            request = match.requests[number]
            row = _filled(slot.names[0], request, _how(plan, number, request, in_place), names.of(request.entry))
        else:
            row = _absent(slot, fates.get(position, "kept"), match.initial_dtypes.get(position, slot.dtype), placement)
        yield row
        yield from (replace(row, name=other, how=f"tied to {slot.names[0]}") for other in slot.names[1:])
    yield from computed


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


def _absent(slot: Slot, how: str, dtype: str, placement: Placement) -> TensorRow:
    return TensorRow(
        name=slot.names[0],
        file_dtype=None,
        dtype=dtype,
        shape=slot.held_shape,
        nbytes=prod(slot.held_shape) * ITEM_BYTES[dtype],
        device=device_of(slot.names[0], placement) or (slot.home if slot.on_meta else slot.device),
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
