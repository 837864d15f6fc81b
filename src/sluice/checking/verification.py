"""Verification of a checkpoint: every byte is read once and passed to the checks that need it."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter

import torch

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._errors import FormatError, IncompleteCheckpointError, IntegrityError, ReadError, TruncatedError
from sluice._options import Limits
from sluice._progress import Progress, byte_progress
from sluice._threads import Workers
from sluice.checking.consumers import ByteStream, Consumer, TensorCheck, bytes_of, feed
from sluice.checking.parts import named_part
from sluice.checking.problems import compare, wrong_checksum
from sluice.checking.read_order import FileRange
from sluice.checking.verification_plan import IndexCheck, VerificationPlan
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, borrow
from sluice.entries.slicing import boxes, slice_entry
from sluice.entries.tree import unsupported
from sluice.formats.manifest import HashAlgorithm, TensorHash, new_hash, read_manifest
from sluice.matching.candidates import likely_state_dicts
from sluice.reading.caches import fill_caches
from sluice.reading.reader import CheckpointReader, PendingTensors
from sluice.reading.scan import (
    Batch,
    ScanItem,
    in_batches,
    pipeline,
    windows,
    work_through,
)
from sluice.reading.sparse_indices import index_lines
from sluice.records import Entry
from sluice.reports.verify import NonFinite, VerifyProblem, VerifyReport
from sluice.sources.opening import find_place, source_path

__all__ = ["Verification", "verify_checkpoint"]

#: Parts of a piece: stream, consumer, first byte, and byte after the last, counted from the start of the piece.
_Shares = list[tuple[ByteStream, Consumer, int, int]]


#: Errors that mean damage. Other errors mean that the file is something else, or cannot be read at all.
_DAMAGE = (FormatError, TruncatedError, IntegrityError, IncompleteCheckpointError)


def verify_checkpoint(
    source: CheckpointSource,
    *,
    key: str | None,
    manifest: str | os.PathLike[str] | None,
    hashes: HashAlgorithm | None,
    nan: bool,
    limits: Limits | None,
    encoding: str,
    progress: Progress,
) -> VerifyReport:
    """Verify a checkpoint; ``sluice.verify`` documents arguments and errors."""
    started = time.perf_counter()
    expected = None if manifest is None else read_manifest(source_path(manifest), limits or Limits())
    algorithm = expected.algorithm if expected else hashes
    if algorithm:
        new_hash(algorithm)  # raises early if a library is missing
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(borrow(source, limits=limits, encoding=encoding))
        except _DAMAGE as error:
            seconds = time.perf_counter() - started
            return VerifyReport(source=find_place(source).title, problems=(VerifyProblem.of(error),), seconds=seconds)
        part = named_part(checkpoint, key, expected.tensors if expected else None)
        named = part.checkpoint
        run = Verification(checkpoint, algorithm, nan=nan, named=named)
        run.run(progress)
        computed, problems, unread = run.hashes, run.problems, unsupported(checkpoint.index.tree)
        if expected:
            unnamed = unsupported(named.index.tree)
            problems += compare(expected, computed, named.entries, ties=named.stored_names, unread=unnamed)
        contradictions = checkpoint.index.contradictions
        return VerifyReport(
            source=checkpoint.path,
            format=checkpoint.format,
            key=part.key,
            state_dicts=tuple(likely_state_dicts(checkpoint.index.tree)),
            problems=tuple(problems),
            tensors=part.tensors + part.outside - len(unread),
            total=part.tensors + part.outside,
            named=part.tensors,
            nbytes=run.read_bytes,
            seconds=time.perf_counter() - started,
            checksums=len(run.plan.records),
            without_checksum=tuple(run.plan.unrecorded),
            algorithm=algorithm,
            hashes=computed,
            non_finite=run.non_finite,
            unsupported=tuple(unread),
            warnings=contradictions,
            notes=(
                *(note for note in checkpoint.index.notes if note not in contradictions),
                *checkpoint.source_notes,
            ),
        )


class Verification:
    """One verification of one checkpoint.

    Attributes:
        plan: The checks and their results.
        read_bytes: Bytes read so far.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        algorithm: HashAlgorithm | None,
        *,
        nan: bool,
        named: OpenCheckpoint | None = None,
    ) -> None:
        """Plan the verification; only headers of records are read.

        Args:
            checkpoint: The checkpoint to verify.
            algorithm: Hash algorithm for every tensor; None for no hashes.
            nan: Whether to count non-finite elements.
            named: The part whose tensors are hashed and counted; None for the whole checkpoint.
        """
        self._named = checkpoint if named is None else named
        self.plan = VerificationPlan(checkpoint, algorithm, nan=nan, named=self._named)
        self.read_bytes = 0
        self._checkpoint = checkpoint
        self._reader = CheckpointReader(checkpoint)
        self._unreadable: list[VerifyProblem] = []

    @property
    def problems(self) -> list[VerifyProblem]:
        """Problems found so far, each once."""
        wrong = [
            wrong_checksum(record.checksum, record.value, self._checkpoint.files[record.file])
            for record in self.plan.records
            if record.value != record.checksum.crc and not record.stream.failed
        ]
        indices = [check.problem for check in self.plan.index_checks if check.problem is not None]
        return list(dict.fromkeys([*self.plan.problems, *self._unreadable, *wrong, *indices]))

    @property
    def hashes(self) -> dict[str, TensorHash]:
        """The hash of each tensor that could be read, in the order of the checkpoint."""
        hashes: dict[str, TensorHash] = {}
        for check in self.plan.tensors:
            entry, hasher = check.entry, check.hasher
            if hasher is not None and check.whole:
                digest = hasher.hexdigest()
                value = TensorHash(dtype=entry.dtype, shape=entry.shape, layout=entry.layout, hash=digest)
                hashes.update(dict.fromkeys(check.names, value))
        return {name: hashes[name] for name in self._named.entries if name in hashes} if hashes else {}

    @property
    def non_finite(self) -> dict[str, NonFinite]:
        """The tensors with elements that are NaN or infinite."""
        return {
            name: NonFinite(nan=check.counter.nan, inf=check.counter.inf)
            for check in self.plan.tensors
            if check.counter and (check.counter.nan or check.counter.inf)
            for name in check.names
        }

    def run(self, progress: Progress) -> None:
        """Read the checkpoint and run all checks."""
        total = sum(each.nbytes for each in self.plan.ranges)
        total += sum(check.entry.nbytes for check in self._apart())
        total += sum(one.nbytes for check in self._unchecked() for one in check.composite.indices)
        fill_caches(self._checkpoint.sources, progress=progress)
        with (
            byte_progress(progress, self._checkpoint.path, total) as report,
            self._reader,
            Workers(self._reader.facts.cores, "sluice-verify") as workers,
        ):

            def advance(nbytes: int) -> None:
                self.read_bytes += nbytes
                if report:
                    report(self.read_bytes)

            def use(batch: Batch[_Shares], read: list[torch.Tensor | ReadError]) -> None:
                work_through(workers, self._jobs(batch, read))
                advance(sum(piece.entry.nbytes for piece in batch))

            pieces = (piece for some in (self._windows(), self._parts()) for piece in some)
            pipeline(in_batches(pieces, defaults.SCAN_BATCH_BYTES), self._start, use)
            self._check_apart(advance)
        if report and not total:
            report(0)
        for check in self.plan.tensors:
            check.finish()

    def _apart(self) -> list[TensorCheck]:
        """Return the tensors that are read entry by entry."""
        return [check for check in self.plan.tensors if check.apart]

    def _unchecked(self) -> list[IndexCheck]:
        """Return the indices that are too many to be held."""
        return [one for one in self.plan.index_checks if one.stream is not None and not one.stream.ranges]

    def _windows(self) -> Iterator[ScanItem[_Shares]]:
        parts = [
            (each, stream, consumer)
            for stream in self.plan.streams()
            for each, consumer in zip(stream.ranges, stream.consumers, strict=True)
        ]
        parts.sort(key=itemgetter(0))
        for each in self.plan.ranges:
            low, high = (bisect_left(parts, (each.file, at), key=_begin) for at in (each.first, each.end))
            for first, last, shares in _shared(windows(each.first, each.end), parts[low:high]):
                yield ScanItem(self._reader.window(each.file, first, last), shares)

    def _parts(self) -> Iterator[ScanItem[_Shares]]:
        for check in self._apart():
            (stream,) = check.streams
            for component in check.entry.components:
                consumer = check.consumer(component)
                for key in boxes(component.shape, defaults.SCAN_BATCH_BYTES // ITEM_BYTES[component.dtype]):
                    part = slice_entry(component, key)
                    if part.numel:
                        yield ScanItem(part, [(stream, consumer, 0, part.nbytes)])

    def _start(self, batch: Batch[_Shares]) -> Callable[[], list[torch.Tensor | ReadError]]:
        try:
            pending = self._reader.start([piece.entry for piece in batch])
        except ReadError:
            pending = None
        return partial(self._finish, batch, pending)

    def _finish(self, batch: Batch[_Shares], pending: PendingTensors | None) -> list[torch.Tensor | ReadError]:
        if pending is not None:
            try:
                return [*pending.result()]
            except ReadError:
                pass
        # Find the unreadable entries, and continue with the others.
        return [self._read_alone(piece.entry) for piece in batch]

    def _read_alone(self, entry: Entry) -> torch.Tensor | ReadError:
        try:
            return self._reader.read([entry])[0]
        except ReadError as error:
            return error

    def _jobs(self, batch: Batch[_Shares], read: Sequence[torch.Tensor | ReadError]) -> list[tuple[int, partial[None]]]:
        """Return one job per stream, which consumes its bytes of a batch in order."""
        work: dict[int, list[tuple[Consumer, memoryview]]] = {}
        for piece, result in zip(batch, read, strict=True):
            if isinstance(result, ReadError):
                self._unreadable.append(VerifyProblem.of(result))
                for stream, *_ in piece.payload:
                    stream.failed = True
                continue
            data = bytes_of(result)
            for stream, consumer, first, last in piece.payload:
                if not stream.failed:  # bytes after a gap would be out of order
                    work.setdefault(id(stream), []).append((consumer, data[first:last]))
        return [(sum(len(data) for _, data in pieces), partial(feed, pieces)) for pieces in work.values()]

    def _check_apart(self, advance: Callable[[int], None]) -> None:
        """Read and check the indices that were too large to buffer."""
        for check in self._unchecked():
            lines = index_lines(check.composite)
            limit = defaults.SCAN_BATCH_BYTES // max(1, len(lines))
            try:
                check.run([self._elements(line, limit, advance) for line in lines])
            except ReadError as error:
                self._unreadable.append(VerifyProblem.of(error))

    def _elements(self, line: Entry, limit_bytes: int, advance: Callable[[int], None]) -> Iterator[torch.Tensor]:
        for key in boxes(line.shape, limit_bytes // ITEM_BYTES[line.dtype]):
            part = slice_entry(line, key)
            yield self._reader.read([part])[0].flatten()
            advance(part.nbytes)


def _begin(part: tuple[FileRange, ByteStream, Consumer]) -> tuple[int, int]:
    return part[0].file, part[0].first


def _shared(
    ranges: Iterable[tuple[int, int]], parts: Iterable[tuple[FileRange, ByteStream, Consumer]]
) -> Iterator[tuple[int, int, _Shares]]:
    """Yield each of ascending ranges with the parts of it that streams consume, counted from its first byte."""
    waiting = list(parts)[::-1]
    active: list[tuple[FileRange, ByteStream, Consumer]] = []
    for first, last in ranges:
        while waiting and waiting[-1][0].first < last:
            active.append(waiting.pop())
        yield (
            first,
            last,
            [
                (stream, consumer, max(each.first, first) - first, min(each.end, last) - first)
                for each, stream, consumer in active
            ],
        )
        active = [part for part in active if part[0].end > last]
