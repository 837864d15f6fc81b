"""The plan of a verification: the checks of a checkpoint, and the bytes that each of them receives.

Every byte is read once, in the order of the files. Tensors whose elements are not in order there, such as views across
rows and tensors in several chunks, and sparse indices are read a second time, in the order of their elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sluice._errors import CheckpointError
from sluice.checking.consumers import (
    ByteStream,
    ByteSwapped,
    Consumer,
    Decoded,
    IndexCheck,
    RecordChecksum,
    TensorCheck,
)
from sluice.checking.non_finite import NonFiniteCounter, has_non_finite
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.tree import walk
from sluice.formats.manifest import HashAlgorithm, new_hash
from sluice.reading.scan import check_repeats, identity, row_major
from sluice.records import Entry, Quantized, Sparse
from sluice.reports.verify import VerifyProblem

__all__ = ["VerificationPlan"]


class VerificationPlan:
    """The checks of one checkpoint. Only headers of records are read to make it.

    Attributes:
        records: Recorded checksums.
        unrecorded: Names of records without a checksum.
        tensors: Tensors that are hashed or counted, each once.
        index_checks: Indices of sparse tensors.
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
        checks = self._sparse_indices()
        pieces = [piece for tensor in self.tensors for piece in tensor.entry.pieces]
        pieces += [piece for check in checks for piece in check.composite.indices]
        self._offsets = self._locate({number for piece in pieces if piece.numel for number in piece.storages})
        self.index_checks = [check for check in checks if self._located(check.composite.indices)]
        for tensor in self.tensors:
            if self._located(tensor.entry.pieces):
                tensor.streams = tuple(self._streams_of(tensor))

    @property
    def streams(self) -> list[ByteStream]:
        """The streams that consume bytes while the files are read, in the order of the files."""
        streams = [record.stream for record in self.records if record.checksum.nbytes]
        streams += [stream for tensor in self.tensors for stream in tensor.streams if stream.file >= 0]
        return sorted(streams, key=lambda stream: (stream.file, stream.first))

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
                checks[id(entry)] = IndexCheck(name, entry, entry.composite)
        return list(checks.values())

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

    def _streams_of(self, check: TensorCheck) -> Iterator[ByteStream]:
        """Yield the streams of a tensor: for the hash and for the counter, or one that is read apart for both."""
        entry = check.entry
        if len(entry.parts) == 1 and entry.parts[0].entry.shape == entry.shape:
            entry = entry.parts[0].entry
        if not (row_major(entry) and entry.numel):
            yield ByteStream()
            return
        storage = self._checkpoint.index.storages[entry.storage]
        offset, (first, end) = self._offsets[entry.storage], entry.byte_span
        for consumer in (check.hasher, check.counter):
            if consumer is not None:
                taker = _elements(entry, storage.swap_bytes, consumer)
                yield ByteStream(storage.file, offset + first, offset + end, taker)


def _elements(entry: Entry, swap_bytes: int, consumer: Consumer) -> Consumer:
    """Return what receives the stored bytes of a view, and passes on its elements."""
    if entry.elements.packing is not None:
        return Decoded(consumer, entry.elements.packing)
    return ByteSwapped(consumer, swap_bytes) if swap_bytes else consumer
