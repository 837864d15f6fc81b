"""The conformance suite of the ``Format`` protocol. Each check opens sources of its own."""

from __future__ import annotations

import errno
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest

from sluice._dtypes import ITEM_BYTES
from sluice._errors import CheckpointError, LimitError, ReadError
from sluice._options import Limits
from sluice.entries.tree import flatten
from sluice.formats.detection import FORMATS
from sluice.formats.protocol import Checksum, Format
from sluice.records import Entry, Index
from sluice.sources.protocol import Source
from support.recorded_reads import RecordingSource
from support.sources import FaultySource, MemorySource

MakeSource: TypeAlias = Callable[[bytes], Source]

#: Tensor data of the file, at least: less could not be told from headers that are read in large pieces.
_SMALLEST_DATA_BYTES = 1 << 20

#: Bytes that reading an index may exceed those of the headers by: headers are read ahead, small gaps are read as well.
_READ_AHEAD_BYTES = 256 << 10

#: Bytes of a file that ``matches`` is given.
_HEAD_BYTES = 4096

_TRUNCATIONS = 40
_FLIPS = 100
_FAULTS = 16
_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """One tensor that a file holds."""

    #: Name of its dtype, as torch spells it: ``"float32"``.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Its elements in row-major order, little-endian; of packed elements, the packs as they are stored.
    data: bytes


def check_format(
    file_format: Format,
    content: bytes,
    tensors: Mapping[str, ExpectedTensor],
    *,
    make_source: MakeSource = MemorySource,
    limits: Iterable[str] = ("entries", "header_bytes", "name_bytes"),
) -> None:
    """Assert that a format keeps the protocol.

    The file is indexed, cut, damaged and failed in many ways. Every failure must be a typed error that names the file.

    Args:
        file_format: The format.
        content: A healthy file with at least 1 MiB of tensor data.
        tensors: Its dense tensors by their dotted names: all of them.
        make_source: Opens bytes as a source; called many times.
        limits: Fields of ``Limits`` that the file exceeds when they are 0, and that the format must enforce.
    """
    assert sum(len(tensor.data) for tensor in tensors.values()) >= _SMALLEST_DATA_BYTES
    case = _FormatCase(file_format, content, tensors, make_source, tuple(limits))
    for check in (
        case.matches,
        case.index,
        case.headers_only,
        case.storages,
        case.elements,
        case.truncated,
        case.damaged,
    ):
        check()
    for check in (case.enforces_limits, case.checksums, case.read_errors, case.concurrent):
        check()


@dataclass(frozen=True, slots=True)
class _FormatCase:
    """The checks of a format with a healthy file."""

    format: Format
    content: bytes
    expected: Mapping[str, ExpectedTensor]
    make_source: MakeSource
    limits: tuple[str, ...]

    @property
    def _end(self) -> int:
        return len(self.content)

    @property
    def _path(self) -> str:
        with closing(self.make_source(self.content)) as source:
            return source.path

    def _read(self, content: bytes | None = None, limits: Limits | None = None) -> Index:
        """Return the index of a file: by default of the healthy one."""
        with closing(self.make_source(self.content if content is None else content)) as source:
            return self.format.read_index(source, limits or Limits())

    def _located(self, source: Source) -> tuple[Index, dict[int, int]]:
        """Return the index of a file and the data offset of every storage."""
        index = self.format.read_index(source, Limits())
        known = {number: storage.offset for number, storage in enumerate(index.storages) if storage.located}
        rest = [number for number in range(len(index.storages)) if number not in known]
        return index, {**known, **self.format.locate(source, index, rest)}

    def _data_ranges(self) -> list[tuple[int, int]]:
        """Return the first byte and the end of each storage of the healthy file."""
        with closing(self.make_source(self.content)) as source:
            index, offsets = self._located(source)
        return [(offsets[number], offsets[number] + storage.nbytes) for number, storage in enumerate(index.storages)]

    def _compare(self, content: bytes) -> None:
        """Assert that a file has all expected elements."""
        with closing(self.make_source(content)) as source:
            index, offsets = self._located(source)
            entries = flatten(index.tree, Limits())
            for name, tensor in self.expected.items():
                assert _bytes_of(source, index, offsets, entries[name]) == tensor.data, name

    def _refused_or(self, work: Callable[[], object]) -> None:
        """Allow a typed error that names the file, and no other."""
        try:
            work()
        except CheckpointError as error:
            assert error.file == self._path

    def matches(self) -> None:
        for known in FORMATS:
            for nbytes in (*range(65), 512):
                assert isinstance(known.matches(self.content[:nbytes]), bool)
            assert known.matches(self.content[:_HEAD_BYTES]) == (known.name == self._detected)
            assert not known.matches(bytes(_HEAD_BYTES))
            assert not known.matches(b"\xff" * _HEAD_BYTES)

    @property
    def _detected(self) -> str:
        """The format that the first bytes show: files of distributed checkpoints are those of torch."""
        return "torch-zip" if self.format.name == "torch-distributed" else self.format.name

    def index(self) -> None:
        with closing(self.make_source(self.content)) as source:
            index = self.format.read_index(source, Limits())
            assert index.format == self.format.name
            assert [(file.path, file.identity) for file in index.files] == [(source.path, source.identity)]
        entries = flatten(index.tree, Limits())
        found = {name: (entry.dtype, tuple(entry.shape)) for name, entry in entries.items()}
        assert found == {name: (tensor.dtype, tensor.shape) for name, tensor in self.expected.items()}

    def headers_only(self) -> None:
        """Reading the index reads the headers, not the tensor data."""
        data_bytes = sum(end - first for first, end in self._data_ranges())
        with closing(RecordingSource(self.make_source(self.content))) as source:
            self.format.read_index(source, Limits())
        assert source.read_bytes <= self._end - data_bytes + _READ_AHEAD_BYTES

    def storages(self) -> None:
        with closing(self.make_source(self.content)) as source:
            index = self.format.read_index(source, Limits())
            rest = [number for number, storage in enumerate(index.storages) if not storage.located]
            assert dict(self.format.locate(source, index, [])) == {}
            offsets = dict(self.format.locate(source, index, rest))
            assert sorted(offsets) == rest
            assert offsets == dict(self.format.locate(source, index, rest))
        for number, storage in enumerate(index.storages):
            first = offsets.get(number, storage.offset)
            assert 0 <= first <= first + storage.nbytes <= self._end, storage.key
            assert storage.file == 0
        assert all(_lies_inside(entry, index) for entry in flatten(index.tree, Limits()).values())

    def elements(self) -> None:
        self._compare(self.content)

    def truncated(self) -> None:
        """A file that is cut is refused, unless every tensor is still complete."""
        generator = random.Random(0)
        ends = {1, 7, 8, 9, 64, self._end // 2, *range(self._end - 24, self._end)}
        ends.update(generator.randrange(1, self._end) for _ in range(_TRUNCATIONS))
        for end in sorted(ends):
            self._refused_or(partial(self._compare, self.content[:end]))
            self._refused_or(partial(self._all_checksums, self.content[:end]))

    def damaged(self) -> None:
        """Damaged headers raise only typed errors; they may go unnoticed."""
        generator = random.Random(1)
        headers = self._header_offsets()
        for _ in range(_FLIPS):
            damaged = bytearray(self.content)
            damaged[generator.choice(headers)] ^= 1 << generator.randrange(8)
            self._refused_or(partial(self._index_and_locate, bytes(damaged)))

    def _header_offsets(self) -> list[int]:
        """Return the offsets of all bytes that are not tensor data."""
        offsets: list[int] = []
        position = 0
        for first, end in sorted([*self._data_ranges(), (self._end, self._end)]):
            offsets += range(position, first)
            position = max(position, end)
        return offsets

    def _index_and_locate(self, content: bytes) -> None:
        with closing(self.make_source(content)) as source:
            index, offsets = self._located(source)
        assert all(0 <= offsets[n] <= len(content) - storage.nbytes for n, storage in enumerate(index.storages))

    def enforces_limits(self) -> None:
        for name in self.limits:
            values: dict[str, Any] = {name: 0}
            with pytest.raises(LimitError) as caught:
                self._read(limits=replace(Limits(), **values))
            assert caught.value.file == self._path

    def _all_checksums(self, content: bytes) -> list[Checksum | CheckpointError]:
        with closing(self.make_source(content)) as source:
            self.format.read_index(source, Limits())
            return list(self.format.checksums(source, Limits()))

    def checksums(self) -> None:
        for checksum in self._all_checksums(self.content):
            assert isinstance(checksum, Checksum)
            data = self.content[checksum.offset : checksum.offset + checksum.nbytes]
            assert not checksum.crc or (len(data), zlib.crc32(data)) == (checksum.nbytes, checksum.crc), checksum.name

    def read_errors(self) -> None:
        """A read that the system fails is reported as that, not as a damaged file."""
        for number in range(1, _FAULTS + 1):
            with closing(FaultySource(self.make_source(self.content), at=number, error=errno.EIO)) as source:
                try:
                    self.format.read_index(source, Limits())
                except ReadError:
                    continue
                assert not source.failed, f"read_index must not ignore that read {number} failed"

    def concurrent(self) -> None:
        """One format object indexes files in several threads, each time with the same result."""
        with ThreadPoolExecutor(_THREADS) as pool:
            assert list(pool.map(lambda _: self._read(), range(_THREADS))) == [self._read()] * _THREADS


def _bytes_of(source: Source, index: Index, offsets: Mapping[int, int], entry: Entry) -> bytes:
    """Return the elements of a dense entry in row-major order, little-endian."""
    assert entry.composite is None
    assert not entry.parts
    if not entry.numel:
        return b""
    assert _lies_inside(entry, index)
    storage, item = index.storages[entry.storage], ITEM_BYTES[entry.dtype]
    data = source.read_at(offsets[entry.storage], storage.nbytes)
    if entry.elements.packing is not None:
        first, end = entry.byte_span
        return data[first:end]
    if storage.swap_bytes:
        data = np.frombuffer(data, np.uint8).reshape(-1, storage.swap_bytes)[:, ::-1].tobytes()
    elements = np.frombuffer(
        data, np.dtype((np.void, item)), len(data) // item - entry.storage_offset, entry.storage_offset * item
    )
    strides = tuple(step * item for step in entry.stride)
    return np.lib.stride_tricks.as_strided(elements, entry.shape, strides).tobytes()


def _lies_inside(entry: Entry, index: Index) -> bool:
    """Return whether the elements of an entry lie inside its storage."""
    if not 0 <= entry.storage < len(index.storages) or entry.storage_offset < 0 or min(entry.stride, default=0) < 0:
        return False
    return not entry.numel or entry.byte_span[1] <= index.storages[entry.storage].nbytes
