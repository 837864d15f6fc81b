"""The plan of a verification: the checks of a checkpoint, and the order in which its bytes are read for them.

A small tensor whose elements are not in order in the files is buffered and hashed after its last byte; a large one is
read a second time, entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from sluice import _defaults as defaults
from sluice._errors import CheckpointError, FormatError
from sluice.checking.consumers import (
    ByteStream,
    ByteSwapped,
    Consumer,
    Decoded,
    RecordChecksum,
    TensorAssembler,
    TensorCheck,
    bytes_of,
    feed,
)
from sluice.checking.non_finite import NonFiniteCounter, has_non_finite
from sluice.checking.read_order import FileRange, schedule
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.tree import walk
from sluice.formats.manifest import HashAlgorithm, new_hash
from sluice.reading.scan import check_repeats, identity, row_major
from sluice.reading.sparse_indices import check_indices, pieces_of
from sluice.records import Entry, Quantized, Sparse
from sluice.reports.verify import VerifyProblem

__all__ = ["IndexCheck", "VerificationPlan"]


class IndexCheck:
    """The indices of one sparse tensor.

    Attributes:
        composite: The components of the tensor.
        stream: The bytes of the indices; without ranges if they are too large to buffer. None if a damaged header hides
            some of them.
        problem: The problem found, or None.
    """

    def __init__(self, name: str, entry: Entry, composite: Sparse, file: str) -> None:
        self.composite = composite
        self.stream: ByteStream | None = None
        self.problem: VerifyProblem | None = None
        self._name, self._entry, self._file = name, entry, file

    def run(self, lines: Sequence[Iterable[torch.Tensor]]) -> None:
        """Check the elements of each of ``index_lines``."""
        try:
            check_indices(self._entry, lines)
        except FormatError as error:
            error.file, error.tensor = self._file, self._name
            self.problem = VerifyProblem.of(error)

    def run_held(self, indices: Sequence[torch.Tensor]) -> None:
        """Check indices that are in memory."""
        held = indices[0] if self.composite.layout == "sparse_coo" else indices
        self.run([pieces_of(one) for one in held])


class VerificationPlan:
    """The checks of one checkpoint. Only headers of records are read to make it.

    Attributes:
        records: Recorded checksums.
        unrecorded: Names of records without a checksum.
        tensors: Tensors that are hashed or counted, each once.
        index_checks: Indices of sparse tensors.
        ranges: All bytes of the files, in read order.
        problems: Problems of headers.
    """

    def __init__(
        self, checkpoint: OpenCheckpoint, algorithm: HashAlgorithm | None, *, nan: bool, named: OpenCheckpoint
    ) -> None:
        """Make the plan.

        Args:
            checkpoint: The checkpoint to verify.
            algorithm: Hash algorithm for every tensor; None for no hashes.
            nan: Whether to count non-finite elements.
            named: The part of it whose tensors are hashed and counted.

        Raises:
            FormatError: Tensors have the same name.
            LimitError: A tensor repeats its stored elements too often.
        """
        self._checkpoint = checkpoint
        self._algorithm = algorithm
        self._nan = nan
        self.problems: list[VerifyProblem] = []
        self.unrecorded: list[str] = []
        self.records = list(self._checksums())
        self.tensors = self._tensor_checks(named) if algorithm or nan else []
        self.index_checks = self._sparse_indices()
        self._offsets = self._locate(self._storages())
        for check in self.index_checks:
            check.stream = self._held(check.composite.indices, check.run_held)
        for tensor in self.tensors:
            if self._located(tensor.entry.pieces):
                self._assign(tensor)
        self.ranges = self._order()

    def _checksums(self) -> Iterator[RecordChecksum]:
        for file, checksums in enumerate(self._checkpoint.checksums()):
            for checksum in checksums:
                if isinstance(checksum, CheckpointError):
                    self.problems.append(VerifyProblem.of(checksum))
                elif checksum.crc:
                    yield RecordChecksum(file, checksum)
                elif checksum.nbytes:
                    self.unrecorded.append(checksum.name)

    def _tensor_checks(self, named: OpenCheckpoint) -> list[TensorCheck]:
        """Return each tensor of a part once, with its names."""
        checks: dict[object, TensorCheck] = {}
        for name, entry in named.entries.items():
            check_repeats(self._checkpoint, name, entry)
            check = checks.setdefault(identity(entry), TensorCheck(entry))
            if not check.names:
                values = entry if entry.composite is None else entry.composite.values
                counted = self._nan and has_non_finite(values.dtype) and not isinstance(entry.composite, Quantized)
                check.hasher = new_hash(self._algorithm) if self._algorithm else None
                check.counter = NonFiniteCounter(values.dtype) if counted else None
            check.names.append(name)
        return [check for check in checks.values() if check.hasher or check.counter]

    def _sparse_indices(self) -> list[IndexCheck]:
        """Return each sparse tensor once, under its first name."""
        checks: dict[int, IndexCheck] = {}
        for name, entry in walk(self._checkpoint.index.tree):
            if isinstance(entry.composite, Sparse) and id(entry) not in checks:
                for indices in entry.composite.indices:
                    check_repeats(self._checkpoint, name, indices)
                checks[id(entry)] = IndexCheck(name, entry, entry.composite, self._checkpoint.path)
        return list(checks.values())

    def _storages(self) -> set[int]:
        pieces = [piece for tensor in self.tensors for piece in tensor.entry.pieces]
        pieces += [piece for check in self.index_checks for piece in check.composite.indices]
        return {number for piece in pieces if piece.numel for number in piece.storages}

    def _locate(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return the data offsets of storages, without those hidden by damaged headers."""
        storages = self._checkpoint.index.storages
        known = {number: storages[number].offset for number in numbers if storages[number].located}
        unknown = [number for number in numbers if number not in known]
        try:
            found = self._checkpoint.locate(unknown, at_once=True)
            return known | {number: found[number] for number in unknown}
        except CheckpointError:  # find the damaged ones
            for number in unknown:
                try:
                    known[number] = self._checkpoint.locate([number], at_once=True)[number]
                except CheckpointError as error:
                    self.problems.append(VerifyProblem.of(error))
            return known

    def _located(self, pieces: Iterable[Entry]) -> bool:
        return all(number in self._offsets for piece in pieces if piece.numel for number in piece.storages)

    def _span(self, piece: Entry) -> FileRange:
        """Return the file range of a view of a storage."""
        offset, (first, end) = self._offsets[piece.storage], piece.byte_span
        return FileRange(self._checkpoint.index.storages[piece.storage].file, offset + first, offset + end)

    def _swapped(self, piece: Entry) -> int:
        """Return the item size of a view that is stored big-endian, or 0."""
        return self._checkpoint.index.storages[piece.storage].swap_bytes

    def _assign(self, check: TensorCheck) -> None:
        """Choose the streams of a tensor."""
        composite = check.entry.composite
        components = check.entry.components
        if all(_in_order(one) is not None for one in components):
            counted = components if composite is None else (composite.values,)
            consumers = ((check.hasher, components), (check.counter, counted))
            check.streams = tuple(
                self._in_order_stream(consumer, some) for consumer, some in consumers if consumer is not None
            )
            return

        def take(tensors: Sequence[torch.Tensor]) -> None:
            feed((check.consumer(one), bytes_of(tensor)) for one, tensor in zip(components, tensors, strict=True))

        held = self._held(components, take) or ByteStream()
        check.streams, check.apart = (held,), not held.ranges

    def _in_order_stream(self, consumer: Consumer, components: Iterable[Entry]) -> ByteStream:
        """Return the stream of tensors whose elements are in order in the files, apart from their byte order."""
        pieces = [piece for one in components for piece in _in_order(one) or () if piece.numel]
        return ByteStream(
            tuple(map(self._span, pieces)), tuple(self._little_endian(consumer, piece) for piece in pieces)
        )

    def _little_endian(self, consumer: Consumer, piece: Entry) -> Consumer:
        """Return what receives the stored bytes of a piece, and passes on its elements."""
        if piece.elements.packing is not None:
            return Decoded(consumer, piece.elements.packing)
        return ByteSwapped(consumer, self._swapped(piece)) if self._swapped(piece) else consumer

    def _held(self, components: Sequence[Entry], done: Callable[[Sequence[torch.Tensor]], None]) -> ByteStream | None:
        """Return a stream that buffers tensors until they are complete; without ranges if they are too large.

        None if a damaged header hides some of them.
        """
        if not self._located(piece for one in components for piece in one.pieces):
            return None
        assembler = TensorAssembler(components, self._span, self._swapped, done)
        nbytes = max(assembler.nbytes, sum(one.nbytes for one in components))
        fits = assembler.nbytes > 0 and nbytes <= defaults.SCAN_GATHERED_BYTES
        return ByteStream(assembler.ranges, (assembler,) * len(assembler.ranges)) if fits else ByteStream()

    def streams(self) -> list[ByteStream]:
        """Return the streams that consume bytes while the files are read in order."""
        streams = [record.stream for record in self.records]
        streams += [stream for tensor in self.tensors for stream in tensor.streams]
        streams += [check.stream for check in self.index_checks if check.stream is not None]
        return [stream for stream in streams if stream.ranges]

    def _order(self) -> tuple[FileRange, ...]:
        """Return the read order; checks whose streams are refused are read entry by entry."""
        streams = self.streams()
        gaps = [source.access.gap_bytes for source in self._checkpoint.sources]
        order = schedule(self._checkpoint.extents, [stream.ranges for stream in streams], gaps)
        refused = {id(streams[number]) for number in order.refused}
        for tensor in self.tensors:
            if any(id(stream) in refused for stream in tensor.streams):
                tensor.streams, tensor.apart = (ByteStream(),), True
        for check in self.index_checks:
            if id(check.stream) in refused:
                check.stream = ByteStream()
        return order.ranges


def _in_order(component: Entry) -> list[Entry] | None:
    """Return the views whose concatenated bytes are the elements of a dense tensor in order; None if there are none."""
    if not component.parts:
        return [component] if row_major(component) else None
    parts = sorted(component.parts, key=lambda part: part.start)
    rows = 0
    for part in parts:
        whole = part.entry.shape[1:] == component.shape[1:] and part.start == (rows, *(0 for _ in component.shape[1:]))
        if not (component.shape and whole and row_major(part.entry)):
            return None
        rows += part.entry.shape[0]
    return [part.entry for part in parts]
