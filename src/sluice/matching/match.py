"""Match the entries of a state dict with the tensors of a module, and list every problem. Pure; no torch.

``match`` works on frozen descriptions of the module's tensors (``Slot``) and on entries by name. Its rules:

- **Ties.** One tensor object is one slot, under all its names. One of the names in the checkpoint is enough. Further
  names are the same tensor if their entries view the same bytes; otherwise the copies are compared during the load.
- **dtype.** None: the module's own, as ``load_state_dict`` casts. ``"auto"``: the checkpoint's. A name: tensors that
  are real floating point in the checkpoint and in the module are cast to it; all others take the module's dtype. The
  dtype of a cast rule overrides all of these.
- **Memory.** A live tensor of the right device and dtype is filled in place. Every other tensor gets new memory in the
  module's layout.
- **Shapes** must be equal. One exception, from ``load_state_dict``: one element in one dimension fits a scalar. With
  ``ignore_mismatched`` a name of a different shape counts as missing, and is reported as mismatched.
- **Parts of tensors.** A slot may hold a region of its tensor, as a rank of a process group does: the shape of the
  whole tensor must be equal, and only the region is requested.
- **Nothing in common.** Not one tensor of the module in the checkpoint is an error, also without ``strict``. Optional
  tensors may all be absent if the module takes attributes or extra state instead.
- **Missing names.** A buffer that older versions of its module did not save keeps its value or starts at zero. Without
  ``strict``, live tensors keep their values and those on meta are initialised by their module's ``reset_parameters``.
  An optional tensor that is live keeps its value; one on meta has none, and is missing like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from msgspec import Struct, field
from msgspec.structs import replace

from sluice._dtypes import is_castable, why_no_cast
from sluice._messages import Findings, Shape
from sluice.entries.patterns import Placement, device_of
from sluice.entries.slicing import slice_entry
from sluice.records import Entry, Request
from sluice.records.geometry import contiguous_stride, is_dense
from sluice.sharding.regions import Region, select_region, shape_of

__all__ = ["Match", "Outline", "Slot", "finished_dtype", "match"]


class Slot(Struct, frozen=True, kw_only=True, gc=False):
    """One tensor object in the state dict of a module."""

    #: Its names in the state dict, in the state dict's order; a tied tensor has several.
    names: tuple[str, ...]
    #: Whether it is a parameter; otherwise a persistent buffer.
    parameter: bool
    #: Size of each dimension of the whole tensor, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension of its memory, in elements.
    stride: tuple[int, ...]
    #: Name of its dtype.
    dtype: str
    #: Device as torch writes it: ``"cpu"``, ``"cuda:0"``, ``"meta"``.
    device: str
    #: Whether autograd records its gradients.
    requires_grad: bool
    #: Whether its memory is live and can be filled element by element.
    in_place: bool
    #: Whether ``reset_parameters`` of an owning module can be called without changing live tensors.
    resettable: bool = False
    #: Version of its module that added it; older state dicts do not have it. None if all versions have it.
    added_in: int | None = None
    #: Whether it has no shape yet and takes the shape of its entry.
    lazy: bool = False
    #: Device of its memory, if it is on meta and the caller places it nowhere.
    home: str = "cpu"
    #: Region of the tensor that it holds, if other ranks hold the rest; None if it holds the whole tensor.
    region: Region | None = None

    @property
    def on_meta(self) -> bool:
        """Whether it has no memory yet."""
        return self.device == "meta"

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Size of each dimension of its memory, in elements."""
        return self.shape if self.region is None else shape_of(self.region)


class Outline(Struct, frozen=True, kw_only=True):
    """The description of a module for matching."""

    #: Its parameters and persistent buffers.
    slots: tuple[Slot, ...]
    #: Names of the extra state of its modules in a state dict.
    extra_state: tuple[str, ...] = ()
    #: Names of tensors that cannot be loaded into; ``problems`` has the reasons.
    refused: tuple[str, ...] = ()
    #: Problems that prevent every load, one sentence each.
    problems: tuple[str, ...] = ()


class Match(Struct, frozen=True, kw_only=True):
    """Which entries fill which slots. ``requests`` and ``slots`` run in parallel."""

    #: Finished tensors to read.
    requests: tuple[Request, ...]
    #: Position in ``Outline.slots`` of each request.
    slots: tuple[int, ...]
    #: Further copies of tied tensors: position in ``requests``, and the request that must have equal bytes.
    comparisons: tuple[tuple[int, Request], ...] = ()
    #: Slots on meta that start at zero.
    zeroed: tuple[int, ...] = ()
    #: Slots on meta that ``reset_parameters`` fills.
    initialised: tuple[int, ...] = ()
    #: Live slots without an entry; they keep their values.
    kept: tuple[int, ...] = ()
    #: Finished dtype of each of ``zeroed`` and ``initialised``.
    initial_dtypes: Mapping[int, str] = field(default_factory=dict)
    #: Names of the module that the checkpoint does not have.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that the module does not have.
    unexpected: tuple[str, ...] = ()
    #: Names of a different shape that were ignored: the shape in the module, and in the checkpoint.
    mismatched: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    #: Groups of names that are one tensor.
    tied: tuple[tuple[str, ...], ...] = ()


def match(  # noqa: PLR0913 - each comes from a different step of the load, and all but two are keyword-only
    outline: Outline,
    entries: Mapping[str, Entry],
    *,
    placement: Placement | None = None,
    dtype: str | None = None,
    strict: bool = True,
    versions: Mapping[str, int] | None = None,
    extra_state: Collection[str] = (),
    optional_names: frozenset[str] | set[str] = frozenset(),
    problems: Sequence[str] = (),
    allow_empty: bool = False,
    ignore_mismatched: bool = False,
    candidates: Sequence[str] = (),
    needs_values: bool = False,
    has_attributes: bool = False,
) -> Match:
    """Match entries with the tensors of a module.

    Args:
        outline: The module.
        entries: The state dict, by the names that the module uses.
        placement: Devices by prefixes of names; tensors that it does not name keep their device.
        dtype: None, ``"auto"`` or the name of a real floating-point dtype; see the head of this module.
        strict: Whether missing and unexpected names are problems.
        versions: Version of each module's state by the module's name, if the file has it.
        extra_state: Names of the extra state in the state dict.
        optional_names: Names that are not required, because a loader of their module accepts that they are missing.
        problems: Problems found before, to report together with these.
        allow_empty: Whether the state dict may have no tensor of a module that needs some.
        ignore_mismatched: Whether names of a different shape count as missing, also if ``strict``.
        candidates: Parts of the checkpoint to choose from, one line each, for that error.
        needs_values: Whether optional tensors on meta that are missing are problems, also without ``strict``.
        has_attributes: Whether the load sets attributes of modules, which are not in ``entries``.

    Raises:
        MismatchError: They do not fit; the error lists every problem.
    """
    matcher = _Matcher(
        entries=entries,
        findings=Findings(report_names=strict, origin_of=lambda name: entries[name].origin if name in entries else ""),
        placement=placement or {},
        dtype=dtype,
        strict=strict,
        versions=versions or {},
        needs_values=needs_values or strict,
        ignore_mismatched=ignore_mismatched,
    )
    for position, slot in enumerate(outline.slots):
        matcher.add(position, slot, optional=not optional_names.isdisjoint(slot.names))
    takes_others = has_attributes or not set(extra_state).isdisjoint(outline.extra_state)
    needs_some = matcher.required or (matcher.optional and not takes_others)
    if needs_some and not (allow_empty or matcher.present):
        matcher.findings.none_of, matcher.findings.candidates = len(outline.slots), candidates
    if extra_state or outline.extra_state or len(matcher.named) < len(entries):
        matcher.add_unmatched(outline, extra_state)
    matcher.findings.others.extend((*outline.problems, *problems))
    matcher.findings.raise_if_any()
    return matcher.result()


def finished_dtype(of_entry: str, of_slot: str, requested: str | None) -> str:
    """Return the dtype of a finished tensor; ``requested`` is the ``dtype`` of ``match``."""
    if requested == "auto":
        return of_entry
    if requested is not None and is_castable(of_entry) and is_castable(of_slot):
        return requested
    return of_slot


class _Matcher(Struct, kw_only=True):
    """Collects requests and problems, slot by slot; see ``match`` for the first fields, and ``Match`` for the last."""

    entries: Mapping[str, Entry]
    placement: Placement
    dtype: str | None
    strict: bool
    versions: Mapping[str, int]
    needs_values: bool
    ignore_mismatched: bool
    findings: Findings
    #: Names of entries that slots have; two paths of a module can be spelled the same.
    named: set[str] = set()
    #: Number of slots with an entry.
    present: int = 0
    #: Number of slots without one that the state dict's version should have.
    required: int = 0
    optional: int = 0
    requests: list[Request] = []
    slots: list[int] = []
    comparisons: list[tuple[int, Request]] = []
    zeroed: list[int] = []
    initialised: list[int] = []
    kept: list[int] = []
    initial_dtypes: dict[int, str] = {}
    mismatched: dict[str, tuple[Shape, Shape]] = {}
    tied: list[tuple[str, ...]] = []

    def add(self, position: int, slot: Slot, *, optional: bool = False) -> None:
        """Match one slot."""
        present = list(filter(self.entries.__contains__, slot.names))
        self.named.update(present)
        if len(slot.names) > 1:
            self.tied.append(slot.names)
        if self.ignore_mismatched and not slot.lazy:
            others = {name: self.entries[name].shape for name in present if not _fits(self.entries[name], slot)}
            self.mismatched.update({name: (slot.shape, shape) for name, shape in others.items()})
            present = [name for name in present if name not in others]
            if others and not present:
                self.required += 1  # a checkpoint of which nothing fits fills nothing
                self._add_fate(position, slot)
                return
        if not present:
            self._add_absent(position, slot, optional=optional)
            return
        if slot.lazy:
            shape = self.entries[present[0]].shape
            slot = replace(slot, shape=shape, stride=contiguous_stride(shape))
        self.present += 1
        first = self._request(present[0], slot)
        for name in present[1:]:
            if _viewed_bytes(self.entries[name]) != _viewed_bytes(self.entries[present[0]]):
                other = self._request(name, slot)
                if first is not None and other is not None:
                    self.comparisons.append((len(self.requests), replace(other, existing=False)))
        if first is not None:
            self.requests.append(first)
            self.slots.append(position)

    def _request(self, name: str, slot: Slot) -> Request | None:
        """Return the request for one name of a slot; note the problem and return None if there cannot be one."""
        entry = self.entries[name]
        if entry.composite is not None:
            self.findings.others.append(
                f"{name!r} is a {entry.layout} tensor in the checkpoint and dense in the module: "
                "read it with sluice.load_state_dict and convert it"
            )
            return None
        if slot.shape == () and entry.shape == (1,):
            entry = slice_entry(entry, 0)
        stored = entry.dtype
        dtype = entry.cast or (slot.dtype if self.dtype is None else finished_dtype(stored, slot.dtype, self.dtype))
        if entry.shape != slot.shape:
            self.findings.shapes.append((name, slot.shape, entry.shape))
            return None
        if not stored == dtype == slot.dtype:
            reason = why_no_cast(stored, dtype, requires_grad=slot.requires_grad)
            if reason:
                self.findings.dtypes.append((name, reason))
                return None
        if slot.region is not None:
            entry = select_region(entry, slot.region)
        placed = device_of(slot.names[0], self.placement) if self.placement else None
        device = placed or (slot.device if slot.in_place or not slot.on_meta else slot.home)
        existing = slot.in_place and (dtype, device) == (slot.dtype, slot.device)
        keeps_stride = existing or is_dense(entry.shape, slot.stride)
        stride = slot.stride if keeps_stride else contiguous_stride(entry.shape)
        return Request(
            name=name,
            entry=entry,
            dtype=dtype,
            device=device,
            stride=stride,
            existing=existing,
            replaces=not (existing or slot.on_meta or slot.lazy),
        )

    def _add_absent(self, position: int, slot: Slot, *, optional: bool) -> None:
        version = self.versions.get(slot.names[0].rpartition(".")[0], 0)
        added_later = slot.added_in is not None and version < slot.added_in
        if not added_later:
            self.required += not optional
            self.optional += optional
            has_value = not slot.on_meta or slot.lazy
            if not (optional and has_value):
                self.findings.missing[slot.names] = None if slot.lazy else slot.shape
                if self.strict or (optional and self.needs_values):
                    self.findings.report_names = True
                    return
        self._add_fate(position, slot, zero=added_later)

    def _add_fate(self, position: int, slot: Slot, *, zero: bool = False) -> None:
        """Decide which value a slot without an entry gets."""
        if not slot.on_meta or slot.lazy:
            fate = self.kept
        elif zero:
            fate = self.zeroed
        elif slot.resettable:
            fate = self.initialised
        else:
            self.findings.others.append(
                f"{slot.names[0]!r} is on the meta device and not in the checkpoint"
                f"{' in this shape' if slot.names[0] in self.mismatched else ''}, and "
                + (
                    "none of its modules can initialise it with reset_parameters()"
                    if slot.region is None
                    else "it is divided over ranks, whose random numbers would not agree: call to_empty() and "
                    "initialise the model before the load"
                )
            )
            return
        fate.append(position)
        if slot.on_meta:
            self.initial_dtypes[position] = finished_dtype(slot.dtype, slot.dtype, self.dtype)

    def add_unmatched(self, outline: Outline, extra_state: Collection[str]) -> None:
        """Note names that only the module or only the state dict has; slots are added before."""
        found = self.findings
        found.missing |= {(name,): None for name in outline.extra_state if name not in extra_state}
        found.unexpected |= {name: None for name in extra_state if name not in outline.extra_state}
        known = {name for slot in outline.slots for name in slot.names}.union(outline.refused)
        found.unexpected |= {name: entry.shape for name, entry in self.entries.items() if name not in known}

    def result(self) -> Match:
        """Return the match."""
        return Match(
            requests=tuple(self.requests),
            slots=tuple(self.slots),
            comparisons=tuple(self.comparisons),
            zeroed=tuple(self.zeroed),
            initialised=tuple(self.initialised),
            kept=tuple(self.kept),
            initial_dtypes=self.initial_dtypes,
            missing=tuple(chain.from_iterable(self.findings.missing)),
            unexpected=tuple(self.findings.unexpected),
            mismatched=self.mismatched,
            tied=tuple(self.tied),
        )


def _fits(entry: Entry, slot: Slot) -> bool:
    return entry.shape == slot.shape or (slot.shape == () and entry.shape == (1,))


def _viewed_bytes(entry: Entry) -> tuple[object, ...]:
    """Return a key that is equal for entries that finish with the same bytes of the file."""
    place = (entry.elements, entry.shape, entry.stride, entry.storage, entry.storage_offset)
    return (*place, entry.parts, entry.cast)
