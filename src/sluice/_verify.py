"""``sluice.verify``: everything that a checkpoint's files say of themselves, and a manifest of them, against the bytes.

Every byte of every file is read once, in ranges of a grid. Checksums, hashes and counts take their share of each range,
whatever it is the share of. Only a tensor whose elements do not follow each other in the file (a transposed view, a
tensor in several chunks, a big-endian one) is read a second time, in its own order, when it is hashed or counted.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Protocol

import torch

from sluice import _options as options
from sluice._checkpoint import Checkpoint, CheckpointSource, borrow
from sluice._dtypes import ITEM_BYTES
from sluice._errors import (
    CheckpointError,
    FormatError,
    IncompleteCheckpointError,
    IntegrityError,
    ReadError,
    TruncatedError,
)
from sluice._manifest import HashAlgorithm, Hasher, Manifest, TensorHash, new_hash, read_manifest
from sluice._mismatch import closest
from sluice._numbers import NonFiniteCounter, has_non_finite
from sluice._options import Limits
from sluice._progress import Progress, byte_progress
from sluice._records import Entry, Quantized
from sluice._scan import (
    Batch,
    Piece,
    PieceReader,
    check_repeats,
    identity,
    in_batches,
    pipeline,
    row_major,
    windows,
    work_through,
)
from sluice._slicing import boxes, slice_entry
from sluice._threads import Workers
from sluice._tree import unsupported, walk
from sluice._verify_report import NonFinite, ProblemKind, VerifyProblem, VerifyReport
from sluice.formats._protocol import Checksum

__all__ = ["verify"]

#: What damage looks like. Everything else means that the file is something else, or cannot be read at all.
_DAMAGE = (FormatError, TruncatedError, IntegrityError, IncompleteCheckpointError)


def verify(
    source: CheckpointSource,
    *,
    manifest: str | os.PathLike[str] | None = None,
    hashes: HashAlgorithm | None = None,
    nan: bool = False,
    limits: Limits | None = None,
    progress: Progress = False,
) -> VerifyReport:
    """Read all of a checkpoint once and say what is damaged, with a fixed amount of memory.

    Checked are the structure that opening checks, the CRC-32 of every record of zip files (also inside
    torch.distributed.checkpoint files), the shard index against the shards, that every byte can be read, and with a
    manifest the dtype, shape and hash of each tensor, in whatever format the checkpoint is now.

    Args:
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        manifest: A manifest that ``save``, ``convert`` or ``VerifyReport.write_manifest`` wrote.
        hashes: Hash every tensor, with ``"sha256"`` or ``"xxh3_128"``; with a manifest its own algorithm is taken.
        nan: Whether to count the elements of each tensor that are NaN or infinite. They are no damage by themselves.
        limits: Bounds for hostile files.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.

    Returns:
        What was found; ``.ok`` is False when anything is damaged, missing, too much or not as the manifest has it.

    Raises:
        CheckpointError: The file does not exist, is unsafe, of a kind that sluice does not read, or passes a limit; or
            the manifest is no manifest.
        ReadError: The file cannot be opened.
        SourceChangedError: The file changed meanwhile.
        ImportError: The hash needs a library that is not installed.

    Example:
        >>> sluice.verify("model.pth", hashes="sha256").write_manifest("pth.manifest.json")
        >>> sluice.verify("model.pth", manifest="pth.manifest.json").ok
        True
    """
    started = time.perf_counter()
    expected = None if manifest is None else read_manifest(os.fsdecode(manifest), limits or Limits())
    algorithm = expected.algorithm if expected else hashes
    if algorithm:
        new_hash(algorithm)  # says now that a library is missing
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(borrow(source, limits=limits))
        except _DAMAGE as error:
            return VerifyReport(
                source=_name(source), problems=(VerifyProblem.of(error),), seconds=time.perf_counter() - started
            )
        job = _Verification(checkpoint, algorithm, nan=nan)
        job.run(progress)
        return job.report(expected, started)


def _name(source: CheckpointSource) -> str:
    path = source if isinstance(source, (str, bytes, os.PathLike)) else getattr(source, "name", "")
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""


class _Taker(Protocol):
    """Takes bytes in order."""

    def update(self, data: memoryview, /) -> None: ...


@dataclass(slots=True, eq=False)
class _Crc:
    """The CRC-32 of a record."""

    file: int
    checksum: Checksum
    value: int = 0

    def update(self, data: memoryview) -> None:
        self.value = zlib.crc32(data, self.value)


@dataclass(slots=True, eq=False)
class _Content:
    """What is found out of one tensor, whatever its names."""

    entry: Entry
    names: list[str] = field(default_factory=list)
    hasher: Hasher | None = None
    counter: NonFiniteCounter | None = None

    def takers(self, component: Entry) -> list[_Taker]:
        """Return what takes the bytes of one of the dense tensors that it is made of: of itself, where it is dense."""
        composite = self.entry.composite
        counted = composite is None or component is composite.values
        return [taker for taker in (self.hasher, self.counter if counted else None) if taker is not None]


#: Shares of a piece: who takes it, and the first and the last byte of it.
_Shares = list[tuple[_Taker, int, int]]


class _Verification:
    """One run over one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, algorithm: HashAlgorithm | None, *, nan: bool) -> None:
        self._checkpoint = checkpoint
        self._algorithm = algorithm
        self._nan = nan
        self._reader = PieceReader(checkpoint)
        self._problems: dict[VerifyProblem, None] = {}  # each once, in order
        self._failed: set[int] = set()
        self._unrecorded: list[str] = []
        self._offsets: Mapping[int, int] = {}
        self._crcs = list(self._checksums())
        self._contents = self._wanted() if algorithm or nan else []
        self._ranges: list[list[tuple[int, int, _Taker]]] = [[] for _ in checkpoint.index.files]
        self._apart: list[_Content] = []
        self._place()
        self._read_bytes = 0

    def _checksums(self) -> Iterator[_Crc]:
        for file, found in enumerate(self._checkpoint.checksums()):
            for one in found:
                if isinstance(one, CheckpointError):
                    self._add(VerifyProblem.of(one))
                elif one.crc:
                    yield _Crc(file, one)
                elif one.nbytes:
                    self._unrecorded.append(one.name)

    def _wanted(self) -> list[_Content]:
        """Return each tensor once, with its names."""
        found: dict[object, _Content] = {}
        for name, entry in self._checkpoint.entries.items():
            check_repeats(self._checkpoint, name, entry)
            content = found.setdefault(identity(entry), _Content(entry))
            if not content.names:
                values = entry if entry.composite is None else entry.composite.values
                counted = self._nan and has_non_finite(values.dtype) and not isinstance(entry.composite, Quantized)
                content.hasher = new_hash(self._algorithm) if self._algorithm else None
                content.counter = NonFiniteCounter(values.dtype) if counted else None
            content.names.append(name)
        return list(found.values())

    def _place(self) -> None:
        """Decide which tensors lie in the files as they are hashed, and which are read apart."""
        for crc in self._crcs:
            first = crc.checksum.offset
            self._ranges[crc.file].append((first, first + crc.checksum.nbytes, crc))
        wanted = {number for content in self._contents for piece in content.entry.pieces for number in _storages(piece)}
        self._offsets = self._locate(wanted)
        storages = self._checkpoint.index.storages
        for content in self._contents:
            entry = content.entry
            if any(number not in self._offsets for piece in entry.pieces for number in _storages(piece)):
                self._failed.add(id(content))
            elif not row_major(entry) or (entry.numel and storages[entry.storage].swap_bytes):
                self._apart.append(content)
            elif entry.numel:
                first = self._offsets[entry.storage] + entry.storage_offset * ITEM_BYTES[entry.dtype]
                ranges = self._ranges[storages[entry.storage].file]
                ranges += [(first, first + entry.nbytes, taker) for taker in content.takers(entry)]

    def _locate(self, wanted: Iterable[int]) -> dict[int, int]:
        """Return the data offsets of storages, without those behind damaged headers."""
        storages = self._checkpoint.index.storages
        known = {number: storages[number].offset for number in wanted if storages[number].located}
        unknown = [number for number in wanted if number not in known]
        try:
            found = self._checkpoint.locate(unknown)
            return known | {number: found[number] for number in unknown}
        except CheckpointError:  # find out which
            for number in unknown:
                try:
                    known[number] = self._checkpoint.locate([number])[number]
                except CheckpointError as error:
                    self._add(VerifyProblem.of(error))
            return known

    def run(self, progress: Progress) -> None:
        """Read everything."""
        total = sum(end - first for first, end in self._checkpoint.extents)
        total += sum(content.entry.nbytes for content in self._apart)
        with (
            byte_progress(progress, self._checkpoint.path, total) as report,
            Workers(self._reader.cores, "sluice-verify") as workers,
        ):

            def use(batch: Batch[_Shares], read: list[torch.Tensor | ReadError]) -> None:
                work_through(workers, self._jobs(batch, read))
                self._read_bytes += sum(piece.entry.nbytes for piece in batch)
                if report:
                    report(self._read_bytes)

            pipeline(self._batches(), self._read, use)
        if report and not total:
            report(0)
        for content in self._apart:
            _finish(content)

    def _batches(self) -> Iterator[Batch[_Shares]]:
        # Not in one batch: what a plan turns round for one tensor is turned round for all that share the bytes.
        for pieces in (self._windows(), self._parts()):
            yield from in_batches(pieces, options.SCAN_BATCH_BYTES)

    def _windows(self) -> Iterator[Piece[_Shares]]:
        for file, (extent, ranges) in enumerate(zip(self._checkpoint.extents, self._ranges, strict=True)):
            for first, last, shares in _shared(windows(*extent), ranges):
                yield Piece(self._reader.window(file, first, last), shares)

    def _parts(self) -> Iterator[Piece[_Shares]]:
        for content in self._apart:
            composite = content.entry.composite
            for component in (content.entry,) if composite is None else composite.components:
                takers = content.takers(component)
                for key in boxes(component.shape, options.SCAN_BATCH_BYTES // ITEM_BYTES[component.dtype]):
                    part = slice_entry(component, key)
                    if part.numel:
                        yield Piece(part, [(taker, 0, part.nbytes) for taker in takers])

    def _read(self, batch: Batch[_Shares]) -> list[torch.Tensor | ReadError]:
        try:
            return [*self._reader.read([piece.entry for piece in batch])]
        except ReadError:  # find out which, and go on with the others
            return [self._read_alone(piece.entry) for piece in batch]

    def _read_alone(self, entry: Entry) -> torch.Tensor | ReadError:
        try:
            return self._reader.read([entry])[0]
        except ReadError as error:
            return error

    def _jobs(self, batch: Batch[_Shares], read: Sequence[torch.Tensor | ReadError]) -> list[tuple[int, partial[None]]]:
        """Return the work on a batch: for each that takes bytes one job, which takes them in order."""
        work: dict[int, tuple[_Taker, list[memoryview]]] = {}
        for piece, content in zip(batch, read, strict=True):
            if isinstance(content, ReadError):
                self._add(VerifyProblem.of(content))
                self._failed.update(id(taker) for taker, _, _ in piece.item)
                continue
            data = memoryview(content.flatten().view(torch.uint8).numpy().data)
            for taker, first, last in piece.item:
                work.setdefault(id(taker), (taker, []))[1].append(data[first:last])
        return [(sum(map(len, pieces)), partial(_feed, taker, pieces)) for taker, pieces in work.values()]

    def report(self, manifest: Manifest | None, started: float) -> VerifyReport:
        """Return what was found, compared with what was expected."""
        checkpoint = self._checkpoint
        for crc in self._crcs:
            if crc.value != crc.checksum.crc and id(crc) not in self._failed:
                self._add(_wrong_crc(crc, checkpoint.files[crc.file]))
        hashes = self._hashes()
        if manifest:
            for problem in _compare(manifest, hashes, checkpoint):
                self._add(problem)
        return VerifyReport(
            source=checkpoint.path,
            format=checkpoint.format,
            problems=tuple(self._problems),
            tensors=sum(1 for _ in walk(checkpoint.index.tree)),
            nbytes=self._read_bytes,
            seconds=time.perf_counter() - started,
            checksums=len(self._crcs),
            without_checksum=tuple(self._unrecorded),
            algorithm=self._algorithm,
            hashes=hashes,
            non_finite=self._non_finite(),
            unsupported=tuple(unsupported(checkpoint.index.tree)),
            notes=checkpoint.index.notes,
        )

    def _hashes(self) -> dict[str, TensorHash]:
        """Return the hash of each tensor that could be read, in the order of the checkpoint."""
        made: dict[str, TensorHash] = {}
        for content in self._contents:
            entry, hasher = content.entry, content.hasher
            if hasher is not None and not {id(content), id(hasher)} & self._failed:
                digest = hasher.hexdigest()
                found = TensorHash(dtype=entry.dtype, shape=entry.shape, layout=entry.layout, hash=digest)
                made.update(dict.fromkeys(content.names, found))
        return {name: made[name] for name in self._checkpoint.entries if name in made} if made else {}

    def _non_finite(self) -> dict[str, NonFinite]:
        return {
            name: NonFinite(nan=content.counter.nan, inf=content.counter.inf)
            for content in self._contents
            if content.counter and (content.counter.nan or content.counter.inf)
            for name in content.names
        }

    def _add(self, problem: VerifyProblem) -> None:
        self._problems[problem] = None


def _storages(piece: Entry) -> tuple[int, ...]:
    return piece.storages if piece.numel else ()


def _shared(
    ranges: Iterable[tuple[int, int]], takers: Iterable[tuple[int, int, _Taker]]
) -> Iterator[tuple[int, int, _Shares]]:
    """Yield each of ascending ranges with the shares that each taker has in it, counted from its first byte."""
    waiting = sorted(takers, key=itemgetter(0), reverse=True)
    active: list[tuple[int, int, _Taker]] = []
    for first, last in ranges:
        while waiting and waiting[-1][0] < last:
            active.append(waiting.pop())
        yield first, last, [(taker, max(begin, first) - first, min(end, last) - first) for begin, end, taker in active]
        active = [one for one in active if one[1] > last]


def _feed(taker: _Taker, pieces: Iterable[memoryview]) -> None:
    for piece in pieces:
        taker.update(piece)


def _finish(content: _Content) -> None:
    """Hash what a quantized tensor keeps as plain numbers."""
    composite = content.entry.composite
    if isinstance(composite, Quantized) and content.hasher:
        for numbers in (composite.scales, composite.zero_points):
            if isinstance(numbers, tuple):
                content.hasher.update(struct.pack(f"<{len(numbers)}d", *numbers))


def _mismatch(name: str, expected: TensorHash, entry: Entry) -> VerifyProblem | None:
    """Return why a tensor cannot have the expected hash, before anything is read."""
    pairs: tuple[tuple[ProblemKind, str, str], ...] = (
        ("dtype", expected.dtype, entry.dtype),
        ("shape", str(list(expected.shape)), str(list(entry.shape))),
        ("layout", expected.layout, entry.layout),
    )
    for kind, wanted, found in pairs:
        if wanted != found:
            return VerifyProblem(kind=kind, problem=f"another {kind}", tensor=name, expected=wanted, found=found)
    return None


def _wrong_crc(crc: _Crc, file: str) -> VerifyProblem:
    return VerifyProblem(
        kind="checksum",
        problem=f"record {crc.checksum.name!r} has another CRC-32",
        file=file,
        offset=crc.checksum.offset,
        expected=f"{crc.checksum.crc:#010x}",
        found=f"{crc.value:#010x}",
    )


def _compare(manifest: Manifest, hashes: Mapping[str, TensorHash], checkpoint: Checkpoint) -> Iterator[VerifyProblem]:
    """Yield where a checkpoint is not as its manifest says."""
    entries = checkpoint.entries
    ties = checkpoint.stored_names
    unread = unsupported(checkpoint.index.tree)
    extra = [name for name in entries if name not in manifest.tensors]
    for name, expected in manifest.tensors.items():
        stored = name if name in entries else ties.get(name, name)
        entry = entries.get(stored)
        if entry is None and name in unread:
            yield VerifyProblem(kind="unsupported", problem="sluice does not read this tensor", tensor=name)
            continue
        if entry is None:
            close = closest(name, [other for other in extra if entries[other].shape == expected.shape])
            found = f"{close!r}, which the manifest does not have" if close else None
            yield VerifyProblem(kind="missing", problem="not in the checkpoint", tensor=name, found=found)
            continue
        mismatch = _mismatch(name, expected, entry)
        if mismatch is not None:
            yield mismatch
        else:
            made = hashes.get(stored)
            if made is not None and made.hash != expected.hash:
                yield VerifyProblem(
                    kind="hash",
                    problem=f"its elements have another {manifest.algorithm}",
                    tensor=name,
                    expected=expected.hash,
                    found=made.hash,
                )
    for name in extra:
        yield VerifyProblem(kind="extra", problem="not in the manifest", tensor=name)
