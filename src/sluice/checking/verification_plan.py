"""The plan of a verification: the checks of a checkpoint, and which bytes of its files are read for which of them.

Tensors that are hashed or counted are read as tensors. What else the files hold is read in windows. A record with a
checksum that is also a tensor is read once, for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from sluice import _defaults as defaults
from sluice._errors import CheckpointError
from sluice.checking.consumers import NonFiniteCounter, RecordChecksum, TensorCheck
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.tree import walk
from sluice.formats.manifest import HashAlgorithm, new_hash
from sluice.reading.scan import check_repeats, identity, row_major
from sluice.records import Entry, Quantized, Sparse
from sluice.reports.verify import VerifyProblem

__all__ = ["VerificationPlan", "indices_of"]

#: Shorter tensors are also read in the windows around them.
_APART_BYTES = 1 << 16


class VerificationPlan:
    """The checks of one checkpoint. Only headers of records are read to make it.

    Attributes:
        records: Recorded checksums.
        unrecorded: Names of records without a checksum.
        tensors: Tensors that are hashed or counted, each once.
        sparse: Sparse tensors by name, with their indices in readable places.
        problems: Problems of headers.
        ranges: Ranges of each file that are read in windows.
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
        sparse = self._sparse_tensors()
        pieces = [piece for tensor in self.tensors for piece in tensor.entry.pieces]
        pieces += [piece for entry in sparse.values() for piece in indices_of(entry)]
        self._offsets = self._locate({number for piece in pieces if piece.numel for number in piece.storages})
        self.sparse = {name: entry for name, entry in sparse.items() if self._located(indices_of(entry))}
        self.tensors = [tensor for tensor in self.tensors if self._located(tensor.entry.pieces)]
        self.ranges = self._ranges()

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
                counted = NonFiniteCounter.counts(values.dtype) and not isinstance(entry.composite, Quantized)
                check.hasher = new_hash(self._algorithm) if self._algorithm else None
                check.counter = NonFiniteCounter() if self._nan and counted else None
            check.names.append(name)
        return [check for check in checks.values() if check.hasher or check.counter]

    def _sparse_tensors(self) -> dict[str, Entry]:
        """Return each sparse tensor once, under its first name."""
        found: dict[int, tuple[str, Entry]] = {}
        for name, entry in walk(self._checkpoint.index.tree):
            if isinstance(entry.composite, Sparse) and id(entry) not in found:
                for indices in entry.composite.indices:
                    check_repeats(self._checkpoint, name, indices)
                found[id(entry)] = name, entry
        return dict(found.values())

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

    def _ranges(self) -> list[list[tuple[int, int]]]:
        """Return the ranges of each file that no tensor covers, and give records to the tensors that cover them."""
        records = {record.range: record for record in self.records}
        recorded = {record.file for record in self.records}
        covered: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        for check in self.tensors:
            entry, parts = check.entry, check.entry.parts
            entry = parts[0].entry if len(parts) == 1 and parts[0].entry.shape == entry.shape else entry
            if not row_major(entry) or entry.nbytes < min(_APART_BYTES, defaults.SCAN_WINDOW_BYTES):
                continue
            storage, offset = self._checkpoint.index.storages[entry.storage], self._offsets[entry.storage]
            first, end = (offset + byte for byte in entry.byte_span)
            if not storage.swap_bytes:
                check.record = records.pop((storage.file, first, end), None)
            if check.record is not None or storage.file not in recorded:
                covered[storage.file].add((first, end))
        files = enumerate(self._checkpoint.open_files)
        return [list(_gaps(file.start, file.end, covered[number])) for number, file in files]


def indices_of(entry: Entry) -> tuple[Entry, ...]:
    """Return the indices of a sparse tensor."""
    return entry.composite.indices if isinstance(entry.composite, Sparse) else ()


def _gaps(at: int, last: int, covered: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for first, end in sorted(covered):
        if at < first:
            yield at, first
        at = max(at, end)
    if at < last:
        yield at, last
