"""``sluice.diff``: which tensors of two checkpoints differ, and by how much, in any two formats."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES
from sluice._messages import closest
from sluice._options import Limits
from sluice._progress import Progress, byte_progress
from sluice._threads import Workers
from sluice.checking.comparison import Comparison
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, borrow
from sluice.entries.assembly import permute
from sluice.entries.slicing import boxes, slice_entry
from sluice.entries.tree import unsupported
from sluice.reading.reader import CheckpointReader
from sluice.reading.scan import Batch, Piece, check_repeats, identity, in_batches, pipeline, work_through
from sluice.records import Entry, Quantized
from sluice.reports.diff import DifferenceKind, DiffReport, TensorDifference

__all__ = ["diff"]


def diff(
    a: CheckpointSource,
    b: CheckpointSource,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    limits: Limits | None = None,
    progress: Progress = False,
) -> DiffReport:
    """Say which tensors of two checkpoints differ in presence, dtype, shape and values, with a fixed amount of memory.

    Tensors are compared by their dotted names, in whatever formats, layouts in storage, shards or chunks they are; a
    part of a checkpoint is compared through ``sluice.open(path, key=...)``. Ties play no part: a name that only one
    side has is no difference where it also has that tensor under a name that both have.

    What sluice does not read in one of them counts as different, because nobody knows.

    Values are compared as numbers, also where the dtypes differ. 0.0 and -0.0 are the same, and so are two NaNs. Of a
    sparse or quantized tensor what it is made of is compared.

    Args:
        a: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        b: The other one.
        rtol: Relative tolerance: elements differ when ``|a - b| > atol + rtol * |b|``.
        atol: Absolute tolerance.
        limits: Bounds for hostile files.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.

    Raises:
        CheckpointError: One of them is damaged, unsafe or of an unknown kind.
        ReadError: The operating system failed a read.
        SourceChangedError: A file changed meanwhile.
        ValueError: A tolerance is negative.

    Example:
        >>> report = sluice.diff("model.pth", "model.pth")
        >>> report.same
        True
        >>> [(one.name, one.kinds, one.max_abs) for one in report.differences]
        []
    """
    started = time.perf_counter()
    if not (rtol >= 0 and atol >= 0):
        raise ValueError("tolerances are not negative")
    with ExitStack() as stack:
        left = stack.enter_context(borrow(a, limits=limits))
        right = stack.enter_context(borrow(b, limits=limits))
        job = _Diff(left, right, rtol=rtol, atol=atol)
        nbytes = job.run(progress)
        return DiffReport(
            a=left.path,
            b=right.path,
            format_a=left.format,
            format_b=right.format,
            differences=tuple(job.differences()),
            common=len(job.pairs),
            tied=tuple(job.tied),
            nbytes=nbytes,
            seconds=time.perf_counter() - started,
        )


@dataclass(slots=True, eq=False)
class _Pair:
    """One tensor in both checkpoints."""

    a: Entry
    b: Entry
    #: What is found of its values; None where they cannot be compared.
    values: Comparison | None = None


class _Diff:
    """One run over two checkpoints."""

    def __init__(self, a: OpenCheckpoint, b: OpenCheckpoint, *, rtol: float, atol: float) -> None:
        self._a, self._b = a, b
        ours, theirs = _entries(a, b), _entries(b, a)
        self._unsupported = {**unsupported(a.index.tree), **unsupported(b.index.tree)}
        for name in self._unsupported:
            ours.pop(name, None)
            theirs.pop(name, None)
        #: Names that only one of them has, for tensors that both have under another name.
        self.tied = [*_tied(ours, theirs), *_tied(theirs, ours)]
        for name in self.tied:
            (ours if name not in theirs else theirs).pop(name)
        self._ours = ours
        self._only_a = {name: entry for name, entry in ours.items() if name not in theirs}
        self._only_b = {name: entry for name, entry in theirs.items() if name not in ours}
        #: What both have, by name; names of one and the same tensor on both sides have one pair.
        self.pairs: dict[str, _Pair] = {}
        known: dict[object, _Pair] = {}
        for name, entry in ours.items():
            if name in theirs:
                pair = _Pair(entry, theirs[name])
                self.pairs[name] = known.setdefault((identity(pair.a), identity(pair.b)), pair)
                if self.pairs[name] is pair and _are_comparable(pair.a, pair.b):
                    check_repeats(a, name, pair.a)
                    check_repeats(b, name, pair.b)
                    pair.values = Comparison(rtol=rtol, atol=atol)

    def run(self, progress: Progress) -> int:
        """Compare all values; return the bytes that were compared."""
        distinct = list(dict.fromkeys(pair for pair in self.pairs.values() if pair.values))
        total = sum(pair.a.nbytes + pair.b.nbytes for pair in distinct)
        done = 0
        with (
            byte_progress(progress, f"{self._a.path}, {self._b.path}", total) as report,
            CheckpointReader(self._a) as left,
            CheckpointReader(self._b) as right,
            Workers(left.facts.cores, "sluice-diff") as workers,
        ):

            def start(batch: Batch[_Other]) -> Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]:
                ours = left.start([piece.entry for piece in batch])
                theirs = right.start([piece.item.entry for piece in batch])
                return lambda: (ours.result(), theirs.result())

            def use(batch: Batch[_Other], found: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
                nonlocal done
                sides = zip(batch, *found, strict=True)
                work_through(workers, [(one.nbytes, partial(_update, piece, one, two)) for piece, one, two in sides])
                done += sum(piece.entry.nbytes + piece.item.entry.nbytes for piece in batch)
                if report:
                    report(done)

            # Both sides of two batches are held, so that each side has half of what a batch may have.
            pipeline(in_batches(self._pieces(distinct), options.SCAN_BATCH_BYTES // 2), start, use)
            if report and not total:
                report(0)
        return done

    def _pieces(self, pairs: list[_Pair]) -> Iterator[Piece[_Other]]:
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
                for key in boxes(one.shape, options.SCAN_WINDOW_BYTES // item):
                    part = slice_entry(one, key)
                    if part.numel:
                        yield Piece(part, _Other(slice_entry(other, key), pair.values))

    def _place(self, pair: _Pair) -> tuple[int, int]:
        """Return the file and the offset where a tensor of the first checkpoint begins: it is read in that order."""
        storages = map(self._a.index.storages.__getitem__, pair.a.storages)
        return min(((storage.file, storage.offset) for storage in storages), default=(0, 0))

    def differences(self) -> Iterator[TensorDifference]:
        """Yield what differs."""
        for name, entry in self._ours.items():
            if name in self._only_a:
                yield _absent(name, entry, self._only_b, "only_a")
            else:
                found = _difference(name, self.pairs[name])
                if found is not None:
                    yield found
        for name, entry in self._only_b.items():
            yield _absent(name, entry, self._only_a, "only_b")
        for name in self._unsupported:
            yield TensorDifference(name=name, kinds=("unsupported",))


@dataclass(frozen=True, slots=True)
class _Other:
    """The other side of a piece, and where what is found goes."""

    entry: Entry
    values: Comparison


def _update(piece: Piece[_Other], one: torch.Tensor, other: torch.Tensor) -> None:
    piece.item.values.update(one, other)


def _entries(own: OpenCheckpoint, other: OpenCheckpoint) -> dict[str, Entry]:
    """Return the tensors by name, also by names of the other that a safetensors file keeps in its metadata only."""
    ties = {name: own.entries[stored] for name, stored in own.stored_names.items() if name in other.entries}
    return {**own.entries, **ties}


def _tied(own: Mapping[str, Entry], other: Mapping[str, Entry]) -> Iterator[str]:
    """Yield names that only one side has, for tensors that it also has under a name that both have."""
    common = {identity(entry) for name, entry in own.items() if name in other}
    yield from (name for name, entry in own.items() if name not in other and identity(entry) in common)


def _are_comparable(a: Entry, b: Entry) -> bool:
    """Return whether two tensors have the same elements, so that each has one to be compared with."""
    ours, theirs = a.components, b.components
    return (
        (a.shape, a.layout) == (b.shape, b.layout)
        and [one.shape for one in ours] == [one.shape for one in theirs]
        and _plain_numbers(a) == _plain_numbers(b)
    )


def _plain_numbers(entry: Entry) -> object:
    """Return what a quantized tensor says beside its dense tensors."""
    made = entry.composite
    if not isinstance(made, Quantized):
        return None
    return made.axis, *(one if isinstance(one, tuple) else None for one in (made.scales, made.zero_points))


def _storage_order(entry: Entry) -> tuple[int, ...]:
    """Return the dimensions in the order in which the elements lie: the order of a comparison does not matter."""
    if entry.parts:
        return tuple(range(len(entry.shape)))
    return tuple(sorted(range(len(entry.shape)), key=lambda dim: -entry.stride[dim]))


def _absent(name: str, entry: Entry, others: Mapping[str, Entry], kind: DifferenceKind) -> TensorDifference:
    similar = closest(name, [other for other, found in others.items() if found.shape == entry.shape])
    if kind == "only_a":
        return TensorDifference(name=name, kinds=(kind,), dtype_a=entry.dtype, shape_a=entry.shape, similar=similar)
    return TensorDifference(name=name, kinds=(kind,), dtype_b=entry.dtype, shape_b=entry.shape, similar=similar)


def _difference(name: str, pair: _Pair) -> TensorDifference | None:
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
