"""Comparison of two checkpoints in any two formats: presence, layout, shape, dtype and values of each tensor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from msgspec import Struct

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._messages import nearest_names
from sluice._progress import Progress, byte_progress
from sluice._threads import Workers
from sluice.checking.comparison import Comparison
from sluice.checking.parts import ComparedPart
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.assembly import permute
from sluice.entries.slicing import boxes, slice_entry
from sluice.entries.tree import unsupported
from sluice.reading.reader import CheckpointReader, fill_caches
from sluice.reading.scan import Batch, ScanItem, check_repeats, identity, in_batches, pipeline, work_through
from sluice.records import Entry, Quantized
from sluice.reports.diff import DifferenceKind, DiffReport, TensorDifference

__all__ = ["compare_parts"]


def compare_parts(
    a: OpenCheckpoint,
    b: OpenCheckpoint,
    parts: tuple[ComparedPart, ComparedPart],
    *,
    rtol: float,
    atol: float,
    progress: Progress,
    started: float,
) -> DiffReport:
    """Compare parts of two checkpoints in a call that started then; ``sluice.diff`` documents arguments and errors."""
    left, right = parts
    job = _CheckpointDiff(left.checkpoint, right.checkpoint, rtol=rtol, atol=atol)
    nbytes = job.run(progress)
    return DiffReport(
        a=a.path,
        b=b.path,
        format_a=a.format,
        format_b=b.format,
        key_a=left.key,
        key_b=right.key,
        tensors_a=left.tensors,
        tensors_b=right.tensors,
        compared_a=len(job.pairs) + len(job.tied_a),
        compared_b=len(job.pairs) + len(job.tied_b),
        outside_a=left.outside,
        outside_b=right.outside,
        differences=tuple(job.differences()),
        common=len(job.pairs),
        tied=(*job.tied_a, *job.tied_b),
        nbytes=nbytes,
        seconds=time.perf_counter() - started,
    )


class _TensorPair(Struct, eq=False):
    """One tensor in both checkpoints."""

    a: Entry
    b: Entry
    #: Differences of its values; None if they cannot be compared.
    values: Comparison | None = None


class _CheckpointDiff:
    """One comparison of two checkpoints."""

    def __init__(self, a: OpenCheckpoint, b: OpenCheckpoint, *, rtol: float, atol: float) -> None:
        self._a, self._b = a, b
        ours, theirs = _entries(a, b), _entries(b, a)
        self._unsupported = {**unsupported(a.index.tree), **unsupported(b.index.tree)}
        for name in self._unsupported:
            ours.pop(name, None)
            theirs.pop(name, None)
        #: Names that only one has, for tensors that both have under another name.
        self.tied_a, self.tied_b = list(_tied(ours, theirs)), list(_tied(theirs, ours))
        for own, tied in ((ours, self.tied_a), (theirs, self.tied_b)):
            for name in tied:
                own.pop(name)
        self._ours = ours
        self._only_a = {name: entry for name, entry in ours.items() if name not in theirs}
        self._only_b = {name: entry for name, entry in theirs.items() if name not in ours}
        #: Tensors that both have, by name; names of one tensor on both sides share a pair.
        self.pairs: dict[str, _TensorPair] = {}
        known: dict[object, _TensorPair] = {}
        for name, entry in ours.items():
            if name in theirs:
                pair = _TensorPair(entry, theirs[name])
                self.pairs[name] = known.setdefault((identity(pair.a), identity(pair.b)), pair)
                if self.pairs[name] is pair and _are_comparable(pair.a, pair.b):
                    check_repeats(a, name, pair.a)
                    check_repeats(b, name, pair.b)
                    pair.values = Comparison(rtol=rtol, atol=atol)

    def run(self, progress: Progress) -> int:
        """Compare all values, and return the number of bytes compared."""
        distinct = list(dict.fromkeys(pair for pair in self.pairs.values() if pair.values))
        total = sum(pair.a.nbytes + pair.b.nbytes for pair in distinct)
        done = 0
        fill_caches((*self._a.sources, *self._b.sources), progress=progress)
        with (
            byte_progress(progress, f"{self._a.path}, {self._b.path}", total) as report,
            CheckpointReader(self._a) as left,
            CheckpointReader(self._b) as right,
            Workers(left.facts.cores, "sluice-diff") as workers,
        ):

            def start(batch: Batch[_Counterpart]) -> Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]:
                ours = left.start([piece.entry for piece in batch])
                theirs = right.start([piece.payload.entry for piece in batch])
                return lambda: (ours(), theirs())

            def use(batch: Batch[_Counterpart], found: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
                nonlocal done
                sides = zip((piece.payload.values.update for piece in batch), *found, strict=True)
                work_through(workers, [(one.nbytes, partial(update, one, two)) for update, one, two in sides])
                done += sum(piece.entry.nbytes + piece.payload.entry.nbytes for piece in batch)
                if report:
                    report(done)

            # Both sides of two batches are in memory, so each side gets half of the batch size.
            pipeline(in_batches(self._pieces(distinct), defaults.SCAN_BATCH_BYTES // 2), start, use)
            if report and not total:
                report(0)
        return done

    def _pieces(self, pairs: list[_TensorPair]) -> Iterator[ScanItem[_Counterpart]]:
        storages = self._a.index.storages
        first = {
            id(pair): min(((storages[n].file, storages[n].offset) for n in pair.a.storages), default=(0, 0))
            for pair in pairs
        }
        for pair in sorted(pairs, key=lambda pair: first[id(pair)]):
            assert pair.values is not None
            for left, right in zip(pair.a.components, pair.b.components, strict=True):
                order = _storage_order(left)
                one, other = permute(left, order), permute(right, order)
                item = max(ITEM_BYTES[one.dtype], ITEM_BYTES[other.dtype])
                for key in boxes(one.shape, defaults.SCAN_WINDOW_BYTES // item):
                    part = slice_entry(one, key)
                    if part.numel:
                        yield ScanItem(part, _Counterpart(slice_entry(other, key), pair.values))

    def differences(self) -> Iterator[TensorDifference]:
        """Yield the tensors that differ."""
        shapes_a, shapes_b = (
            {name: entry.shape for name, entry in only.items()} for only in (self._only_a, self._only_b)
        )
        nearest_b = nearest_names(shapes_a, shapes_b.items())
        nearest_a = nearest_names(shapes_b, shapes_a.items())
        for name, entry in self._ours.items():
            if name in self._only_a:
                yield TensorDifference(
                    name=name,
                    kinds=("only_a",),
                    dtype_a=entry.dtype,
                    shape_a=entry.shape,
                    similar=nearest_b.get(name),
                )
            else:
                difference = _difference(name, self.pairs[name])
                if difference is not None:
                    yield difference
        for name, entry in self._only_b.items():
            yield TensorDifference(
                name=name, kinds=("only_b",), dtype_b=entry.dtype, shape_b=entry.shape, similar=nearest_a.get(name)
            )
        for name in self._unsupported:
            yield TensorDifference(name=name, kinds=("unsupported",))


class _Counterpart(Struct, frozen=True):
    """The other side of a piece, and the comparison that it belongs to."""

    entry: Entry
    values: Comparison


def _entries(own: OpenCheckpoint, other: OpenCheckpoint) -> dict[str, Entry]:
    """Return the tensors by name, including names of the other side that are only in the metadata of safetensors."""
    ties = {name: own.entries[stored] for name, stored in own.stored_names.items() if name in other.entries}
    return {**own.entries, **ties}


def _tied(own: Mapping[str, Entry], other: Mapping[str, Entry]) -> Iterator[str]:
    """Yield names that only one side has, for tensors that it also has under a common name."""
    common = {identity(entry) for name, entry in own.items() if name in other}
    yield from (name for name, entry in own.items() if name not in other and identity(entry) in common)


def _are_comparable(a: Entry, b: Entry) -> bool:
    """Return whether two tensors have the same stored elements, so that each has a counterpart."""
    ours, theirs = a.components, b.components
    return (
        (a.shape, a.layout) == (b.shape, b.layout)
        and [one.shape for one in ours] == [one.shape for one in theirs]
        and _plain_numbers(a) == _plain_numbers(b)
    )


def _plain_numbers(entry: Entry) -> object:
    """Return the scales and zero points of a quantized tensor that are plain numbers, and its axis."""
    composite = entry.composite
    if not isinstance(composite, Quantized):
        return None
    return composite.axis, *(
        numbers if isinstance(numbers, tuple) else None for numbers in (composite.scales, composite.zero_points)
    )


def _storage_order(entry: Entry) -> tuple[int, ...]:
    """Return the dimensions in storage order: values can be compared in any order."""
    if entry.parts:
        return tuple(range(len(entry.shape)))
    return tuple(sorted(range(len(entry.shape)), key=lambda dim: -entry.stride[dim]))


def _difference(name: str, pair: _TensorPair) -> TensorDifference | None:
    a, b, values = pair.a, pair.b, pair.values
    kinds: list[DifferenceKind] = []
    if a.shape != b.shape:
        kinds.append("shape")
    elif values is None:
        kinds.append("layout")
    if a.dtype != b.dtype:
        kinds.append("dtype")
    if values is not None and values.different:
        kinds.append("values")
    if not kinds:
        return None
    return TensorDifference(
        name=name,
        kinds=tuple(kinds),
        dtype_a=a.dtype,
        dtype_b=b.dtype,
        shape_a=a.shape,
        shape_b=b.shape,
        elements=sum(one.numel for one in a.components) if values else 0,
        different=values.different if values else 0,
        nan=values.nan if values else 0,
        max_abs=values.max_abs if values else 0.0,
        max_rel=values.max_rel if values else 0.0,
    )
