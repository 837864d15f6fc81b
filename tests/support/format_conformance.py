"""The conformance suite of the ``Format`` protocol: checks that every format must pass, without a test runner.

Each check opens sources of its own. A check that fails does not stop the others.
"""

from __future__ import annotations

import errno
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from sluice._dtypes import ITEM_BYTES
from sluice._errors import CheckpointError, LimitError, ReadError
from sluice._options import Limits
from sluice.entries.tree import flatten
from sluice.formats.protocol import Checksum, Format
from sluice.records import Entry, Index
from sluice.sources.protocol import Source
from sluice.testing import RecordingSource
from support.source_conformance import in_threads, must_raise, require, run_checks
from support.sources import FaultySource, MemorySource

__all__ = ["ExpectedTensor", "check_format"]

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
    """Check that a format keeps the ``Format`` protocol.

    The file is indexed, cut, damaged and failed in many ways. Every failure must be a typed error that names the file.

    Args:
        file_format: The format.
        content: A healthy file with at least 1 MiB of tensor data.
        tensors: Its dense tensors by their dotted names: all of them.
        make_source: Opens bytes as a source; called many times.
        limits: Fields of ``Limits`` that the file exceeds when they are 0, and that the format must enforce.

    Raises:
        AssertionError: Checks failed; the message lists all of them and what was expected.
        ValueError: ``tensors`` holds too little data.
    """
    data_bytes = sum(len(tensor.data) for tensor in tensors.values())
    if data_bytes < _SMALLEST_DATA_BYTES:
        raise ValueError(f"the tensors must have at least {_SMALLEST_DATA_BYTES} bytes, not {data_bytes}")
    case = _FormatCase(file_format, content, tensors, make_source, tuple(limits))
    checks = [
        *(case.matches, case.index, case.headers_only, case.storages, case.elements, case.truncated, case.damaged),
        *(case.enforces_limits, case.checksums, case.read_errors, case.concurrent),
    ]
    run_checks("the format does not keep the protocol", lambda check: check(), checks)


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

    def _compare(self, what: str, content: bytes) -> None:
        """Require that a file has all expected elements."""
        with closing(self.make_source(content)) as source:
            index, offsets = self._located(source)
            entries = flatten(index.tree, Limits())
            for name, tensor in self.expected.items():
                found = _bytes_of(source, index, offsets, entries[name]) if name in entries else None
                require(found == tensor.data, f"{what} must have the expected elements of tensor {name!r}")

    def _typed(self, what: str, work: Callable[[], object]) -> None:
        """Allow that ``work`` raises a typed error, which names the file."""
        try:
            work()
        except CheckpointError as error:
            require(error.file == self._path, f"the error of {what} must name the file, not {error.file!r}")
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{what} must raise a CheckpointError, not {type(error).__name__}: {error}") from error

    def matches(self) -> None:
        for nbytes in (*range(65), 512, _HEAD_BYTES):
            answer = self.format.matches(self.content[:nbytes])
            require(isinstance(answer, bool), f"matches must return a bool, not {type(answer).__name__}")
        require(self.format.matches(self.content[:_HEAD_BYTES]), "matches must accept the head of the file")
        for other, what in ((bytes(_HEAD_BYTES), "zeros"), (b"\xff" * _HEAD_BYTES, "bytes 255")):
            require(not self.format.matches(other), f"matches must refuse a file of {what}")

    def index(self) -> None:
        with closing(self.make_source(self.content)) as source:
            index = self.format.read_index(source, Limits())
            named, own = index.format, self.format.name
            require(named == own, f"Index.format must be {own!r}, not {named!r}")
            files = [(file.path, file.identity) for file in index.files]
            require(files == [(source.path, source.identity)], "Index.files must be path and identity of the source")
        entries = flatten(index.tree, Limits())
        names = (sorted(entries), sorted(self.expected))
        require(names[0] == names[1], f"the tensors must be {names[1]}, not {names[0]}")
        for name, tensor in self.expected.items():
            found, expected = (entries[name].dtype, tuple(entries[name].shape)), (tensor.dtype, tensor.shape)
            require(found == expected, f"dtype and shape of tensor {name!r} must be {expected}, not {found}")

    def headers_only(self) -> None:
        """Check that reading the index reads the headers, not the tensor data."""
        data_bytes = sum(end - first for first, end in self._data_ranges())
        with closing(RecordingSource(self.make_source(self.content))) as source:
            self.format.read_index(source, Limits())
        most = self._end - data_bytes + _READ_AHEAD_BYTES
        require(source.read_bytes <= most, f"read_index must read at most {most} bytes, not {source.read_bytes}")

    def storages(self) -> None:
        with closing(self.make_source(self.content)) as source:
            index = self.format.read_index(source, Limits())
            rest = [number for number, storage in enumerate(index.storages) if not storage.located]
            require(dict(self.format.locate(source, index, [])) == {}, "locate must return nothing for no storages")
            offsets = dict(self.format.locate(source, index, rest))
            require(sorted(offsets) == rest, "locate must return the offset of every storage that is not located")
            again = dict(self.format.locate(source, index, rest))
            require(offsets == again, "locate must return the same offsets each time")
        for number, storage in enumerate(index.storages):
            first = offsets.get(number, storage.offset)
            inside = first >= 0 and storage.nbytes >= 0 and first + storage.nbytes <= self._end
            require(inside, f"storage {storage.key!r} must lie inside the file")
            require(storage.file == 0, f"storage {storage.key!r} must be in file 0, the only one")
        for name, entry in flatten(index.tree, Limits()).items():
            require(_lies_inside(entry, index), f"tensor {name!r} must lie inside its storage")

    def elements(self) -> None:
        self._compare("the file", self.content)

    def truncated(self) -> None:
        """Check that a file that is cut is refused, unless every tensor is still complete."""
        generator = random.Random(0)
        ends = {1, 7, 8, 9, 64, self._end // 2, *range(self._end - 24, self._end)}
        ends.update(generator.randrange(1, self._end) for _ in range(_TRUNCATIONS))
        for end in sorted(ends):
            what = f"a file of {end} bytes, cut from {self._end}, must be refused, or"
            self._typed(what, partial(self._compare, what, self.content[:end]))
            self._typed(f"checksums of {what}", partial(self._all_checksums, self.content[:end]))

    def damaged(self) -> None:
        """Check that damaged headers raise only typed errors; they may go unnoticed."""
        generator = random.Random(1)
        headers = self._header_offsets()
        for _ in range(_FLIPS):
            offset = generator.choice(headers)
            damaged = bytearray(self.content)
            damaged[offset] ^= 1 << generator.randrange(8)
            self._typed(f"a file whose byte {offset} changed", partial(self._index_and_locate, bytes(damaged)))

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
        inside = all(0 <= offsets[n] <= len(content) - storage.nbytes for n, storage in enumerate(index.storages))
        require(inside, "storages of a damaged file must lie inside it, or the file must be refused")

    def enforces_limits(self) -> None:
        for name in self.limits:
            values: dict[str, Any] = {name: 0}
            call = partial(self._read, limits=replace(Limits(), **values))
            must_raise(LimitError, f"a file that exceeds Limits({name}=0)", call, file=self._path)

    def _all_checksums(self, content: bytes) -> list[Checksum | CheckpointError]:
        with closing(self.make_source(content)) as source:
            self.format.read_index(source, Limits())
            return list(self.format.checksums(source, Limits()))

    def checksums(self) -> None:
        for checksum in self._all_checksums(self.content):
            if isinstance(checksum, CheckpointError):
                raise AssertionError(f"checksums of a healthy file must not report an error: {checksum}")  # noqa: TRY004
            data = self.content[checksum.offset : checksum.offset + checksum.nbytes]
            inside = not checksum.crc or len(data) == checksum.nbytes
            require(inside, f"the range of checksum {checksum.name!r} must lie inside the file")
            right = not checksum.crc or zlib.crc32(data) == checksum.crc
            require(right, f"checksum {checksum.name!r} must be the CRC-32 of its range")

    def read_errors(self) -> None:
        """Check that a read that the system fails is reported as that, not as a damaged file."""
        for number in range(1, _FAULTS + 1):
            with closing(FaultySource(self.make_source(self.content), at=number, error=errno.EIO)) as source:
                try:
                    self.format.read_index(source, Limits())
                except ReadError:
                    continue
                except Exception as error:
                    text = f"must raise the ReadError, not {type(error).__name__}: {error}"
                    raise AssertionError(f"read_index, when read {number} fails, {text}") from error
                require(not source.failed, f"read_index must not ignore that read {number} failed")

    def concurrent(self) -> None:
        """Check that one format object indexes files in several threads, each time with the same result."""
        expected = self._read()
        in_threads(_THREADS, lambda _: require(self._read() == expected, "indexes of the same file must be equal"))


def _bytes_of(source: Source, index: Index, offsets: Mapping[int, int], entry: Entry) -> bytes:
    """Return the elements of a dense entry in row-major order, little-endian."""
    require(entry.composite is None and not entry.parts, "the file must hold dense tensors, each a view of a storage")
    if not entry.numel:
        return b""
    require(_lies_inside(entry, index), "each tensor must lie inside its storage")
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
