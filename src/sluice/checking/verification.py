"""Verification of a checkpoint: every byte is read and passed to the checks that need it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._errors import (
    FormatError,
    IncompleteCheckpointError,
    IntegrityError,
    ReadError,
    SluiceError,
    TruncatedError,
)
from sluice._options import DEFAULT_LIMITS, Limits
from sluice._progress import Progress, byte_progress
from sluice._threads import Workers
from sluice.checking.consumers import Consumer, RecordChecksum, TensorCheck
from sluice.checking.manifests import compare
from sluice.checking.parts import named_part
from sluice.checking.verification_plan import VerificationPlan, indices_of
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, OpensItself, borrow
from sluice.entries.slicing import boxes, slice_entry
from sluice.entries.tree import unsupported
from sluice.formats.manifest import HashAlgorithm, TensorHash, new_hash, read_manifest
from sluice.matching.candidates import likely_state_dicts
from sluice.reading.reader import CheckpointReader, Pending, fill_caches
from sluice.reading.scan import Batch, ScanItem, in_batches, pipeline, windows, work_through
from sluice.reading.sparse_indices import check_indices, index_lines
from sluice.records import Entry, Sparse
from sluice.reports.verify import NonFinite, VerifyProblem, VerifyReport
from sluice.sources.opening import find_place, source_path

__all__ = ["verify_checkpoint"]

#: Checks of a piece, their consumers, and first and last element of the piece for these.
_Shares = list[tuple[RecordChecksum | TensorCheck, list[Consumer], int, int]]

#: Errors of a read after which others may succeed: of the system, and of what is computed when it is read.
_UNREADABLE = (ReadError, FormatError, IntegrityError)

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
    expected = None if manifest is None else read_manifest(source_path(manifest), limits or DEFAULT_LIMITS)
    algorithm = expected.algorithm if expected else hashes
    if algorithm:
        new_hash(algorithm)  # raises early if a library is missing
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(borrow(source, limits=limits, encoding=encoding))
        except _DAMAGE as error:
            seconds = time.perf_counter() - started
            title = str(source) if isinstance(source, OpensItself) else find_place(source).title
            return VerifyReport(source=title, problems=(VerifyProblem.of(error),), seconds=seconds)
        part = named_part(checkpoint, key, expected.tensors if expected else None)
        named = part.checkpoint
        run = _Verification(checkpoint, named, VerificationPlan(checkpoint, algorithm, nan=nan, named=named))
        run.run(progress)
        computed, problems, unread = run.hashes, run.problems, unsupported(checkpoint.index.tree)
        if expected:
            unnamed = unsupported(named.index.tree)
            problems += compare(expected, computed, named.entries, ties=named.stored_names, unread=unnamed)
        contradictions = checkpoint.index.contradictions
        return VerifyReport(
            source=checkpoint.path,
            files=checkpoint.files,
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


class _Verification:
    """One verification of one checkpoint.

    Attributes:
        plan: The checks and their results.
        read_bytes: Bytes read so far.
    """

    def __init__(self, checkpoint: OpenCheckpoint, named: OpenCheckpoint, plan: VerificationPlan) -> None:
        self.plan = plan
        self.read_bytes = 0
        self._checkpoint, self._named = checkpoint, named
        self._reader = CheckpointReader(checkpoint)
        self._unreadable: list[VerifyProblem] = []
        self._wrong_indices: list[VerifyProblem] = []

    @property
    def problems(self) -> list[VerifyProblem]:
        """Problems found so far, each once."""
        wrong = [
            record.problem(self._checkpoint.files[record.file])
            for record in self.plan.records
            if record.value != record.checksum.crc and not record.failed
        ]
        return list(dict.fromkeys([*self.plan.problems, *self._unreadable, *wrong, *self._wrong_indices]))

    @property
    def hashes(self) -> dict[str, TensorHash]:
        """The hash of each tensor that could be read, in the order of the checkpoint."""
        hashes: dict[str, TensorHash] = {}
        for check in self.plan.tensors:
            entry, hasher = check.entry, check.hasher
            if hasher is not None and not check.failed:
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
        total = sum(end - first for ranges in self.plan.ranges for first, end in ranges)
        total += sum(_stored_bytes(part) for check in self.plan.tensors for part in check.entry.components)
        total += sum(one.nbytes for entry in self.plan.sparse.values() for one in indices_of(entry))
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

            def use(batch: Batch[_Shares], read: list[torch.Tensor | SluiceError]) -> None:
                work_through(workers, self._jobs(batch, read))
                advance(sum(_stored_bytes(piece.entry) for piece in batch))

            pieces = (piece for some in (self._tensors(), self._windows()) for piece in some)
            pipeline(in_batches(pieces, defaults.SCAN_BATCH_BYTES), self._start, use)
            self._check_indices(advance)
        if report and not total:
            report(0)
        for check in self.plan.tensors:
            check.finish()

    def _tensors(self) -> Iterator[ScanItem[_Shares]]:
        """Yield the elements of the tensors that are hashed or counted, in their order."""
        for check in self.plan.tensors:
            for component in check.entry.components:
                consumers = check.consumers(component)
                for part in _pieces_of(component, defaults.SCAN_BATCH_BYTES):
                    yield ScanItem(part, [(check, consumers, 0, part.numel)])

    def _windows(self) -> Iterator[ScanItem[_Shares]]:
        """Yield the other bytes of the files in order, each with the records that it holds parts of."""
        taken = {check.record.range for check in self.plan.tensors if check.record is not None}
        records = [each for each in self.plan.records if each.checksum.nbytes and each.range not in taken]
        waiting = sorted(records, key=lambda record: record.range, reverse=True)
        for file, ranges in enumerate(self.plan.ranges):
            active: list[RecordChecksum] = []
            for first, last in (window for each in ranges for window in windows(*each)):
                while waiting and waiting[-1].range[:2] < (file, last):
                    active.append(waiting.pop())
                shares: _Shares = []
                for record in active:
                    _, start, end = record.range
                    shares.append((record, [record.update], max(start, first) - first, min(end, last) - first))
                yield ScanItem(self._reader.window(file, first, last), shares)
                active = [record for record in active if record.range[2] > last]

    def _start(self, batch: Batch[_Shares]) -> Callable[[], list[torch.Tensor | SluiceError]]:
        try:
            pending = self._reader.start([piece.entry for piece in batch])
        except _UNREADABLE:
            pending = None
        return partial(self._finish, batch, pending)

    def _finish(self, batch: Batch[_Shares], pending: Pending | None) -> list[torch.Tensor | SluiceError]:
        if pending is not None:
            try:
                return [*pending()]
            except _UNREADABLE:
                pass
        # Find the unreadable entries, and continue with the others.
        return [self._read_alone(piece.entry) for piece in batch]

    def _read_alone(self, entry: Entry) -> torch.Tensor | SluiceError:
        try:
            return self._reader.read([entry])[0]
        except _UNREADABLE as error:
            return error

    def _jobs(
        self, batch: Batch[_Shares], read: Sequence[torch.Tensor | SluiceError]
    ) -> list[tuple[int, partial[None]]]:
        """Return one job per consumer, which gets its part of a batch in order."""
        work: dict[Consumer, list[torch.Tensor]] = {}
        for piece, result in zip(batch, read, strict=True):
            if not isinstance(result, torch.Tensor):
                self._unreadable.append(VerifyProblem.of(result))
                for check, *_ in piece.payload:
                    check.fail()
                continue
            data = result.flatten()
            for _, consumers, first, last in piece.payload:
                for consumer in consumers:
                    work.setdefault(consumer, []).append(data[first:last])
        return [(sum(each.nbytes for each in own), partial(_feed, consumer, own)) for consumer, own in work.items()]

    def _check_indices(self, advance: Callable[[int], None]) -> None:
        """Read and check the indices of sparse tensors."""

        def elements(line: Entry, limit_bytes: int) -> Iterator[torch.Tensor]:
            for part in _pieces_of(line, limit_bytes):
                [read] = self._reader.read([part])
                advance(part.nbytes)  # before the last one, after which no more are asked for
                yield read.flatten()

        for name, entry in self.plan.sparse.items():
            assert isinstance(entry.composite, Sparse)
            lines = index_lines(entry.composite)
            limit_bytes = defaults.SCAN_BATCH_BYTES // max(1, len(lines))
            try:
                check_indices(entry, [elements(line, limit_bytes) for line in lines])
            except ReadError as error:
                self._unreadable.append(VerifyProblem.of(error))
            except FormatError as error:
                error.file, error.tensor = self._checkpoint.path, name
                self._wrong_indices.append(VerifyProblem.of(error))


def _feed(consumer: Consumer, pieces: Iterable[torch.Tensor]) -> None:
    """Pass pieces to a consumer, in order."""
    for data in pieces:
        consumer(data)


def _stored_bytes(entry: Entry) -> int:
    packing = entry.elements.packing
    return entry.nbytes if packing is None else entry.numel // packing.elements * packing.nbytes


def _pieces_of(entry: Entry, limit_bytes: int) -> Iterator[Entry]:
    """Yield parts of a dense tensor of at most ``limit_bytes``, which are its elements in order."""
    parts = (slice_entry(entry, key) for key in boxes(entry.shape, limit_bytes // ITEM_BYTES[entry.dtype]))
    return (part for part in parts if part.numel)
