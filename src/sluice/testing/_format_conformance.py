"""The conformance suite of the ``Format`` protocol: checks that every format must pass, without a test runner.

Each check opens sources of its own. A check that fails does not stop the others.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
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
from sluice._public import public
from sluice.entries.tree import flatten
from sluice.formats.protocol import Checksum, Format
from sluice.records import Entry, Index
from sluice.sources.protocol import Source
from sluice.testing._conformance import collect, must_raise, require
from sluice.testing._memory import MemorySource
from sluice.testing._recording import FaultySource, RecordingSource

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


@public("sluice.testing")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """One tensor that a file holds."""

    #: Name of its dtype, as torch spells it: ``"float32"``.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Its elements in row-major order, little-endian; of packed elements, the packs as they are stored.
    data: bytes


@public("sluice.testing")
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

    Example:
        >>> saved = sluice.save({"w": torch.zeros(512, 512)}, "w.safetensors")
        >>> expected = {"w": ExpectedTensor(dtype="float32", shape=(512, 512), data=bytes(1 << 20))}
        >>> check_format(SafetensorsFormat(), Path("w.safetensors").read_bytes(), expected)
    """
    data_bytes = sum(len(tensor.data) for tensor in tensors.values())
    if data_bytes < _SMALLEST_DATA_BYTES:
        raise ValueError(f"the tensors must have at least {_SMALLEST_DATA_BYTES} bytes, not {data_bytes}")
    case = _FormatCase(file_format, content, tensors, make_source, tuple(limits))
    problems: list[str] = []
    for check in _CHECKS:
        collect(check.__name__, problems, check, case)
    if problems:
        raise AssertionError("the format does not keep the protocol:\n" + "\n".join(problems))


@dataclass(frozen=True, slots=True)
class _FormatCase:
    """The format and the file that it is checked with."""

    format: Format
    content: bytes
    tensors: Mapping[str, ExpectedTensor]
    make_source: MakeSource
    limits: tuple[str, ...]

    @property
    def end(self) -> int:
        return len(self.content)

    def read_index(self, content: bytes | None = None, limits: Limits | None = None) -> Index:
        """Return the index of a file: by default of the healthy one."""
        with closing(self.make_source(self.content if content is None else content)) as source:
            return self.format.read_index(source, limits or Limits())

    def locate(self, source: Source, index: Index) -> dict[int, int]:
        """Return the data offset of every storage."""
        known = {number: storage.offset for number, storage in enumerate(index.storages) if storage.located}
        rest = [number for number in range(len(index.storages)) if number not in known]
        return {**known, **self.format.locate(source, index, rest)}

    def data_ranges(self) -> list[tuple[int, int]]:
        """Return the first byte and the end of each storage of the healthy file."""
        with closing(self.make_source(self.content)) as source:
            index = self.format.read_index(source, Limits())
            offsets = self.locate(source, index)
        return [(offsets[number], offsets[number] + storage.nbytes) for number, storage in enumerate(index.storages)]

    def compare(self, content: bytes) -> str | None:
        """Index a file and return the first difference from the expected tensors, or None."""
        with closing(self.make_source(content)) as source:
            index = self.format.read_index(source, Limits())
            offsets = self.locate(source, index)
            entries = flatten(index.tree, Limits())
            for name, tensor in self.tensors.items():
                if name not in entries:
                    return f"tensor {name!r} must be in the index"
                if _bytes_of(source, index, offsets, entries[name]) != tensor.data:
                    return f"the elements of tensor {name!r} must be the expected ones"
        return None


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


def _refused(case: _FormatCase, what: str, work: Callable[..., object], *arguments: object) -> bool:
    """Return whether ``work`` raises a typed error; it must not raise any other one, and the error names the file."""
    path = _path(case)
    try:
        work(*arguments)
    except CheckpointError as error:
        require(error.file == path, f"the error of {what} must name the file {path!r}, not {error.file!r}")
        return True
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{what} must raise a CheckpointError, not {type(error).__name__}: {error}") from error
    return False


def _path(case: _FormatCase) -> str:
    with closing(case.make_source(case.content)) as source:
        return source.path


# The checks, in the order in which they run


def _matches(case: _FormatCase) -> None:
    for nbytes in (*range(65), 512, _HEAD_BYTES):
        answer = case.format.matches(case.content[:nbytes])
        require(isinstance(answer, bool), f"matches must return a bool, not {type(answer).__name__}")
    require(case.format.matches(case.content[:_HEAD_BYTES]), "matches must accept the head of the file")
    for other, what in ((bytes(_HEAD_BYTES), "zeros"), (b"\xff" * _HEAD_BYTES, "bytes 255")):
        require(not case.format.matches(other), f"matches must refuse a file of {what}")


def _index(case: _FormatCase) -> None:
    with closing(case.make_source(case.content)) as source:
        index = case.format.read_index(source, Limits())
        require(index.format == case.format.name, f"Index.format must be {case.format.name!r}, not {index.format!r}")
        files = [(file.path, file.identity) for file in index.files]
        require(files == [(source.path, source.identity)], "Index.files must be the path and identity of the source")
    entries = flatten(index.tree, Limits())
    names = (sorted(entries), sorted(case.tensors))
    require(names[0] == names[1], f"the tensors must be {names[1]}, not {names[0]}")
    for name, tensor in case.tensors.items():
        found, expected = (entries[name].dtype, tuple(entries[name].shape)), (tensor.dtype, tensor.shape)
        require(found == expected, f"dtype and shape of tensor {name!r} must be {expected}, not {found}")


def _deterministic(case: _FormatCase) -> None:
    require(case.read_index() == case.read_index(), "two indexes of the same file must be equal")


def _headers_only(case: _FormatCase) -> None:
    """Reading the index reads the headers, not the tensor data."""
    data_bytes = sum(end - first for first, end in case.data_ranges())
    source = RecordingSource(case.make_source(case.content))
    with closing(source):
        case.format.read_index(source, Limits())
    most = case.end - data_bytes + _READ_AHEAD_BYTES
    require(source.read_bytes <= most, f"read_index must read at most {most} bytes, not {source.read_bytes}")


def _storages(case: _FormatCase) -> None:
    with closing(case.make_source(case.content)) as source:
        index = case.format.read_index(source, Limits())
        located = {number for number, storage in enumerate(index.storages) if storage.located}
        rest = sorted(set(range(len(index.storages))) - located)
        require(dict(case.format.locate(source, index, [])) == {}, "locate must return nothing for no storages")
        offsets = dict(case.format.locate(source, index, rest))
        require(sorted(offsets) == rest, "locate must return the offset of every storage that is not located")
        again = dict(case.format.locate(source, index, rest))
        require(offsets == again, "locate must return the same offsets each time")
        for number, storage in enumerate(index.storages):
            first = offsets.get(number, storage.offset)
            inside = first >= 0 and storage.nbytes >= 0 and first + storage.nbytes <= case.end
            require(inside, f"storage {storage.key!r} must lie inside the file")
            require(storage.file == 0, f"storage {storage.key!r} must be in file 0, the only one")
    for name, entry in flatten(index.tree, Limits()).items():
        require(_lies_inside(entry, index), f"tensor {name!r} must lie inside its storage")


def _elements(case: _FormatCase) -> None:
    difference = case.compare(case.content)
    require(difference is None, difference or "")


def _truncated(case: _FormatCase) -> None:
    """A file that is cut must be refused, unless every tensor is still complete."""
    generator = random.Random(0)  # noqa: S311  (the same places every time)
    ends = {1, 7, 8, 9, 64, case.end // 2, *range(case.end - 24, case.end)}
    ends.update(generator.randrange(1, case.end) for _ in range(_TRUNCATIONS))
    for end in sorted(ends):
        what = f"a file of {end} bytes, cut from {case.end},"
        cut = case.content[:end]
        _refused(case, what, _require_complete, case, what, cut)
        _refused(case, f"checksums of {what}", _all_checksums, case, cut)


def _require_complete(case: _FormatCase, what: str, content: bytes) -> None:
    difference = case.compare(content)
    require(difference is None, f"{what} must be refused: {difference}")


def _damaged(case: _FormatCase) -> None:
    """Damaged headers may go unnoticed, but they raise only typed errors."""
    generator = random.Random(1)  # noqa: S311  (the same places every time)
    headers = _header_offsets(case)
    for _ in range(_FLIPS):
        offset = generator.choice(headers)
        damaged = bytearray(case.content)
        damaged[offset] ^= 1 << generator.randrange(8)
        _refused(case, f"a file whose byte {offset} changed", _index_and_locate, case, bytes(damaged))


def _header_offsets(case: _FormatCase) -> list[int]:
    """Return the offsets of all bytes that are not tensor data."""
    offsets: list[int] = []
    position = 0
    for first, end in sorted([*case.data_ranges(), (case.end, case.end)]):
        offsets += range(position, first)
        position = max(position, end)
    return offsets


def _index_and_locate(case: _FormatCase, content: bytes) -> None:
    with closing(case.make_source(content)) as source:
        index = case.format.read_index(source, Limits())
        offsets = case.locate(source, index)
        inside = all(
            0 <= offsets[number] <= len(content) - storage.nbytes for number, storage in enumerate(index.storages)
        )
        require(inside, "storages of a damaged file must lie inside it, or the file must be refused")


def _limits(case: _FormatCase) -> None:
    for name in case.limits:
        values: dict[str, Any] = {name: 0}
        low = replace(Limits(), **values)
        what = f"a file that exceeds Limits({name}=0)"
        error = must_raise(LimitError, what, partial(case.read_index, limits=low))
        named = isinstance(error, LimitError) and error.file == _path(case)
        require(named, f"the error of {what} must name the file")


def _all_checksums(case: _FormatCase, content: bytes) -> list[Checksum | CheckpointError]:
    with closing(case.make_source(content)) as source:
        case.format.read_index(source, Limits())
        return list(case.format.checksums(source, Limits()))


def _checksums(case: _FormatCase) -> None:
    for checksum in _all_checksums(case, case.content):
        require(isinstance(checksum, Checksum), f"checksums of a healthy file must not report an error: {checksum}")
        if isinstance(checksum, Checksum) and checksum.crc:
            data = case.content[checksum.offset : checksum.offset + checksum.nbytes]
            require(len(data) == checksum.nbytes, f"the range of checksum {checksum.name!r} must lie inside the file")
            require(zlib.crc32(data) == checksum.crc, f"checksum {checksum.name!r} must be the CRC-32 of its range")


def _read_errors(case: _FormatCase) -> None:
    """A read that the system fails must be reported as that, not as a damaged file."""
    for number in range(1, _FAULTS + 1):
        with closing(FaultySource(case.make_source(case.content), at=number, error=errno.EIO)) as source:
            try:
                case.format.read_index(source, Limits())
            except ReadError:
                continue
            except Exception as error:
                what = f"read_index, when read {number} fails,"
                raise AssertionError(f"{what} must raise the ReadError, not {type(error).__name__}: {error}") from error
            require(not source.failed, f"read_index must not ignore that read {number} failed")


def _concurrent(case: _FormatCase) -> None:
    """One format object indexes files in several threads."""
    expected = case.read_index()
    problems: list[str] = []

    def work() -> None:
        try:
            if case.read_index() != expected:
                problems.append("indexes that are read in several threads must be equal")
        except Exception as error:  # noqa: BLE001  (reported in the caller's thread)
            problems.append(f"reading the index in several threads raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require(not problems, problems[0] if problems else "")


def _nothing_left(case: _FormatCase) -> None:
    before = _resources()
    for content in (case.content, case.content[: case.end // 2]):
        _refused(case, "a file", _all_checksums, case, content)
    gc.collect()
    threads, descriptors = _resources()
    require(threads <= before[0], f"threads must end with the call: {sorted(threads - before[0])}")
    require(descriptors <= before[1], "files that a format opens must be closed when it returns")


def _resources() -> tuple[frozenset[str], int]:
    try:
        descriptors = len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        descriptors = 0
    return frozenset(f"{thread.name} {thread.ident}" for thread in threading.enumerate()), descriptors


_CHECKS: tuple[Callable[[_FormatCase], None], ...] = (
    _matches,
    _index,
    _deterministic,
    _headers_only,
    _storages,
    _elements,
    _truncated,
    _damaged,
    _limits,
    _checksums,
    _read_errors,
    _concurrent,
    _nothing_left,
)
