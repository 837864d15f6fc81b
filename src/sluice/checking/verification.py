"""One verification: everything is read once, and each byte goes to whoever wants it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES
from sluice._errors import ReadError
from sluice._progress import Progress, byte_progress
from sluice._threads import Workers
from sluice.checking.consumers import Content, Flow, Taker, bytes_of, feed
from sluice.checking.problems import wrong_checksum
from sluice.checking.read_order import Span
from sluice.checking.verification_plan import IndexCheck, VerifyPlan
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.slicing import boxes, slice_entry
from sluice.formats.manifest import HashAlgorithm, TensorHash
from sluice.reading.reader import CheckpointReader, PendingTensors
from sluice.reading.scan import (
    Batch,
    Piece,
    in_batches,
    pipeline,
    windows,
    work_through,
)
from sluice.reading.sparse_indices import index_lines
from sluice.records import Entry
from sluice.reports.verify import NonFinite, VerifyProblem

__all__ = ["Verification"]

#: Shares of a piece: the flow, who takes it, and the first and the last byte of it.
_Shares = list[tuple[Flow, Taker, int, int]]


class Verification:
    """One run over one checkpoint.

    Attributes:
        plan: What is looked at, and what was found of it.
        read_bytes: Bytes read so far.
    """

    def __init__(self, checkpoint: OpenCheckpoint, algorithm: HashAlgorithm | None, *, nan: bool) -> None:
        """Decide what is looked at and in which order it is read; only headers of records are read for that.

        Args:
            checkpoint: What is verified.
            algorithm: Hashes every tensor; None for no hashes.
            nan: Whether elements that are not finite are counted.
        """
        self.plan = VerifyPlan(checkpoint, algorithm, nan=nan)
        self.read_bytes = 0
        self._checkpoint = checkpoint
        self._reader = CheckpointReader(checkpoint)
        self._unreadable: list[VerifyProblem] = []

    @property
    def problems(self) -> list[VerifyProblem]:
        """What was found so far, each problem once."""
        wrong = [
            wrong_checksum(crc.checksum, crc.value, self._checkpoint.files[crc.file])
            for crc in self.plan.crcs
            if crc.value != crc.checksum.crc and not crc.flow.failed
        ]
        indices = [check.problem for check in self.plan.checks if check.problem is not None]
        return list(dict.fromkeys([*self.plan.problems, *self._unreadable, *wrong, *indices]))

    @property
    def hashes(self) -> dict[str, TensorHash]:
        """The hash of each tensor that could be read, in the order of the checkpoint."""
        made: dict[str, TensorHash] = {}
        for content in self.plan.contents:
            entry, hasher = content.entry, content.hasher
            if hasher is not None and content.whole:
                digest = hasher.hexdigest()
                found = TensorHash(dtype=entry.dtype, shape=entry.shape, layout=entry.layout, hash=digest)
                made.update(dict.fromkeys(content.names, found))
        return {name: made[name] for name in self._checkpoint.entries if name in made} if made else {}

    @property
    def non_finite(self) -> dict[str, NonFinite]:
        """The tensors with elements that are NaN or infinite."""
        return {
            name: NonFinite(nan=content.counter.nan, inf=content.counter.inf)
            for content in self.plan.contents
            if content.counter and (content.counter.nan or content.counter.inf)
            for name in content.names
        }

    def run(self, progress: Progress) -> None:
        """Read everything."""
        total = sum(span.nbytes for span in self.plan.spans)
        total += sum(content.entry.nbytes for content in self._apart())
        total += sum(one.nbytes for check in self._unchecked() for one in check.composite.indices)
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
            pipeline(in_batches(pieces, options.SCAN_BATCH_BYTES), self._start, use)
            self._check_apart(advance)
        if report and not total:
            report(0)
        for content in self.plan.contents:
            content.finish()

    def _apart(self) -> list[Content]:
        """Return the tensors that are read by themselves."""
        return [content for content in self.plan.contents if content.apart]

    def _unchecked(self) -> list[IndexCheck]:
        """Return the indices that are too many to be held."""
        return [one for one in self.plan.checks if one.flow is not None and not one.flow.spans]

    def _windows(self) -> Iterator[Piece[_Shares]]:
        wanted = [(span, flow, flow.takers[n]) for flow in self.plan.flows() for n, span in enumerate(flow.spans)]
        wanted.sort(key=lambda one: one[0])
        for span in self.plan.spans:
            low, high = (bisect_left(wanted, (span.file, at), key=_begin) for at in (span.first, span.end))
            for first, last, shares in _shared(windows(span.first, span.end), wanted[low:high]):
                yield Piece(self._reader.window(span.file, first, last), shares)

    def _parts(self) -> Iterator[Piece[_Shares]]:
        for content in self._apart():
            (flow,) = content.flows
            for component in content.entry.components:
                taker = content.taker(component)
                for key in boxes(component.shape, options.SCAN_BATCH_BYTES // ITEM_BYTES[component.dtype]):
                    part = slice_entry(component, key)
                    if part.numel:
                        yield Piece(part, [(flow, taker, 0, part.nbytes)])

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
        # Find out which cannot be read, and go on with the others.
        return [self._read_alone(piece.entry) for piece in batch]

    def _read_alone(self, entry: Entry) -> torch.Tensor | ReadError:
        try:
            return self._reader.read([entry])[0]
        except ReadError as error:
            return error

    def _jobs(self, batch: Batch[_Shares], read: Sequence[torch.Tensor | ReadError]) -> list[tuple[int, partial[None]]]:
        """Return the work on a batch: for each flow one job, which takes its bytes in order."""
        work: dict[int, list[tuple[Taker, memoryview]]] = {}
        for piece, found in zip(batch, read, strict=True):
            if isinstance(found, ReadError):
                self._unreadable.append(VerifyProblem.of(found))
                for flow, *_ in piece.item:
                    flow.failed = True
                continue
            data = bytes_of(found)
            for flow, taker, first, last in piece.item:
                if not flow.failed:  # what follows a gap would be arranged wrongly
                    work.setdefault(id(flow), []).append((taker, data[first:last]))
        return [(sum(len(data) for _, data in pieces), partial(feed, pieces)) for pieces in work.values()]

    def _check_apart(self, advance: Callable[[int], None]) -> None:
        """Read and check the indices that nothing held."""
        for check in self._unchecked():
            lines = index_lines(check.composite)
            limit = options.SCAN_BATCH_BYTES // max(1, len(lines))
            try:
                check.run([self._elements(line, limit, advance) for line in lines])
            except ReadError as error:
                self._unreadable.append(VerifyProblem.of(error))

    def _elements(self, line: Entry, limit_bytes: int, advance: Callable[[int], None]) -> Iterator[torch.Tensor]:
        for key in boxes(line.shape, limit_bytes // ITEM_BYTES[line.dtype]):
            part = slice_entry(line, key)
            yield self._reader.read([part])[0].flatten()
            advance(part.nbytes)


def _begin(one: tuple[Span, Flow, Taker]) -> tuple[int, int]:
    return one[0].file, one[0].first


def _shared(
    ranges: Iterable[tuple[int, int]], wanted: Iterable[tuple[Span, Flow, Taker]]
) -> Iterator[tuple[int, int, _Shares]]:
    """Yield each of ascending ranges with the shares that each taker has in it, counted from its first byte."""
    waiting = list(wanted)[::-1]
    active: list[tuple[Span, Flow, Taker]] = []
    for first, last in ranges:
        while waiting and waiting[-1][0].first < last:
            active.append(waiting.pop())
        yield (
            first,
            last,
            [
                (flow, taker, max(span.first, first) - first, min(span.end, last) - first)
                for span, flow, taker in active
            ],
        )
        active = [one for one in active if one[0].end > last]
