"""``torch.save`` zip files: ``data.pkl`` with the object, and one stored record per storage.

The records are those of torch 2: ``data.pkl``, ``.format_version``, ``.storage_alignment``, ``byteorder``, ``data/0``,
``data/1``, ... and ``version``. Everything but the CRCs is known before the first byte is written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from sluice.writing.safetensors import TensorOutline
from sluice.writing.zip_archive import Archive

__all__ = ["HashedTensor", "TorchFile", "TorchZipWriter", "Writable"]

#: Small records that torch writes next to the object and its data.
_SMALL_RECORDS = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": sys.byteorder.encode()}

_VERSION = b"3\n"

#: Bytes per write of the central directory.
_PIECE_BYTES = 1 << 20


class HashedTensor(Struct, frozen=True, kw_only=True):
    """A tensor of a torch file, for the manifest."""

    #: Its dtype and shape in the file.
    outline: TensorOutline
    #: Number of the storage that holds its elements, in row-major order, and nothing else; otherwise None.
    storage: int | None
    #: The tensor.
    source: Any


class TorchFile(Struct, frozen=True, kw_only=True):
    """Layout of a torch file and the sources of its storages."""

    #: Content of ``data.pkl``.
    pickled: bytes | bytearray
    #: Source of each storage, whose row-major elements it holds, and its dtype.
    storages: Sequence[tuple[Any, str]]
    #: Size of each storage, in bytes.
    sizes: Sequence[int]
    #: Number of places of its tensors; a container that occurs more than once counts once.
    tensors: int
    #: Number of cast tensors by pair of dtypes.
    casts: Mapping[str, int]
    #: Tensors of the manifest by name.
    hashed: Mapping[str, HashedTensor]


class Writable(Protocol):
    """A file, or a part of one, whose bytes are written in any order."""

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at byte ``offset``; each byte once. Thread-safe."""
        ...


class TorchZipWriter:
    """Writer of a file whose layout is fixed. Storages have the numbers that the pickle gives them."""

    def __init__(self, pickled: bytes | bytearray, sizes: Iterable[int], *, in_order: bool = False) -> None:
        """Lay out the file.

        Args:
            pickled: Content of ``data.pkl``.
            sizes: Size of each storage, in bytes.
            in_order: Whether the file is written from its first byte to its last. Storages are then written in order.
        """
        # torch names the directory after the file, and reads any name.
        self._archive = Archive("archive", in_order=in_order)
        self._in_order = in_order
        small = {"data.pkl": pickled, **_SMALL_RECORDS}
        self._small = {self._archive.add(name, len(content)): content for name, content in small.items()}
        self._first = len(small)
        for number, nbytes in enumerate(sizes):
            self._archive.add(f"data/{number}", nbytes)
        self._last = self._archive.add("version", len(_VERSION))
        self._small[self._last] = _VERSION
        self._begun = -1
        #: Size of the tensor data, in bytes.
        self.nbytes = sum(map(self._archive.nbytes, range(self._first, self._last)))

    @property
    def records_bytes(self) -> int:
        """Size of the file without its central directory, in bytes."""
        return self._archive.end

    @property
    def file_bytes(self) -> int:
        """Size of the whole file, in bytes."""
        return self._archive.end + sum(map(len, self._archive.directory()))

    def offset(self, storage: int) -> int:
        """Return the first byte of a storage in the file."""
        return self._archive.data(self._first + storage)

    def write(self, file: Writable, storage: int, at: int, piece: bytes | memoryview) -> None:
        """Write a piece of a storage; each byte once, in any order unless the file is written in order. Thread-safe.

        Args:
            file: The file.
            storage: Number of the storage.
            at: First byte of the piece in the storage.
            piece: The bytes.
        """
        number = self._first + storage
        if self._in_order:
            self._begin_records(file, number)
        file.write_at(self._archive.data(number) + at, piece)
        self._archive.account(number, at, piece)

    def finish(self, file: Writable) -> int:
        """Write everything but the storages, after all of them; return the size of the file in bytes."""
        self._begin_records(file, self._last)
        self._end_record(file)
        at = self._archive.end
        for piece in _joined(self._archive.directory()):
            file.write_at(at, piece)
            at += len(piece)
        return at

    def _begin_records(self, file: Writable, last: int) -> None:
        """Write what precedes the data of a record and was not written before: headers and small records."""
        while self._begun < last:
            self._end_record(file)
            self._begun += 1
            content = self._small.get(self._begun, b"")
            if content:
                self._archive.account(self._begun, 0, content)
            file.write_at(self._archive.header_offset(self._begun), self._archive.header(self._begun))
            if content:
                file.write_at(self._archive.data(self._begun), content)

    def _end_record(self, file: Writable) -> None:
        """Write what follows the data of the last record."""
        if self._begun >= 0 and (descriptor := self._archive.descriptor(self._begun)):
            data = self._archive.data(self._begun)
            file.write_at(data + self._archive.nbytes(self._begun), descriptor)


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= _PIECE_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)
