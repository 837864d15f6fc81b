"""``torch.save`` zip files: ``data.pkl`` with the object, and one stored record per storage.

The file holds only the range of each storage that its tensors need. The records are those of torch 2: ``data.pkl``,
``.format_version``, ``.storage_alignment``, ``byteorder``, ``data/0``, ``data/1``, ... and ``version``. Everything but
the CRCs is known before the first byte is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from sluice._dtypes import ITEM_BYTES, dtype_name, why_no_cast
from sluice._errors import SaveError
from sluice.writing.chunks import Staging, row_major_bytes
from sluice.writing.composites import count_parts, dense_parts, describe
from sluice.writing.durable.replacement import NewFile
from sluice.writing.items import StorageSpan, collect_spans, finished_dtype, refuse_unsupported, storage_key
from sluice.writing.manifest import ManifestWriter
from sluice.writing.pickle_walk import walk_object
from sluice.writing.torch_pickle import is_plain, pickle_object, refusal
from sluice.writing.torch_tensors import Described, Geometry
from sluice.writing.write_queue import write_queue
from sluice.writing.zip_archive import Archive

__all__ = ["SavedObject", "TorchZipWriter", "Writable", "lay_out_torch_zip", "write_torch_zip"]

#: Small records that torch writes next to the object and its data.
_SMALL_RECORDS = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": sys.byteorder.encode()}

_VERSION = b"3\n"

#: Bytes per write of the central directory, and per read of a storage for its CRC.
_PIECE_BYTES = 1 << 20


class Writable(Protocol):
    """A file, or a part of one, whose bytes are written in any order."""

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at byte ``offset``; each byte once. Thread-safe."""
        ...


class TorchZipWriter:
    """Writer of a file whose layout is fixed. Storages have the numbers that the pickle gives them."""

    def __init__(self, pickled: bytes | bytearray, sizes: Iterable[int]) -> None:
        """Lay out the file.

        Args:
            pickled: Content of ``data.pkl``.
            sizes: Size of each storage, in bytes.
        """
        # torch names the directory after the file, and reads any name.
        self._archive = Archive("archive")
        self._small = {"data.pkl": pickled, **_SMALL_RECORDS}
        for name, content in self._small.items():
            self._archive.add(name, len(content))
        self._first = len(self._small)
        for number, nbytes in enumerate(sizes):
            self._archive.add(f"data/{number}", nbytes)
        self._version = self._archive.add("version", len(_VERSION))
        #: Size of the tensor data, in bytes.
        self.nbytes = sum(map(self._archive.nbytes, self._storages()))

    def _storages(self) -> range:
        return range(self._first, self._version)

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

    def write(self, file: Writable, storage: int, at: int, piece: bytes | memoryview, *, account: bool = True) -> None:
        """Write a piece of a storage; each byte once, in any order. Thread-safe.

        Args:
            file: The file.
            storage: Number of the storage.
            at: First byte of the piece in the storage.
            piece: The bytes.
            account: Whether to add the piece to the CRC now; for many small pieces ``account_written`` is faster.
        """
        file.write_at(self.offset(storage) + at, piece)
        if account:
            self._archive.account(self._first + storage, at, piece)

    def account_runs(self, storage: int, ends: npt.NDArray[np.int64], crcs: npt.NDArray[np.uint32]) -> None:
        """Add pieces of a storage that were written in a different way to its CRC; see ``Archive.account_all``."""
        self._archive.account_all(self._first + storage, ends, crcs)

    def sums(self) -> bytes:
        """Return the CRCs of what this process has written, for ``add_sums`` of an equal writer."""
        return self._archive.sums()

    def add_sums(self, sums: bytes) -> None:
        """Add the CRCs of what another process has written to the same file."""
        self._archive.add_sums(sums)

    def read(self, file: NewFile, storage: int, at: int, nbytes: int) -> bytes:
        """Return up to ``nbytes`` written bytes of a storage from ``at`` on."""
        return file.read_at(self.offset(storage) + at, nbytes)

    def account_written(self, file: NewFile, storage: int) -> None:
        """Compute the CRC of a storage from the file, if it was written with ``account=False``."""
        number = self._first + storage
        nbytes = self._archive.nbytes(number)
        at = 0
        while at < nbytes:
            piece = self.read(file, storage, at, min(_PIECE_BYTES, nbytes - at))
            self._archive.account(number, at, piece)
            at += len(piece)

    def finish(self, file: Writable) -> int:
        """Write everything but the storages, after all of them; return the size of the file in bytes."""
        for number, content in enumerate((*self._small.values(), _VERSION)):
            record = number if number < self._first else self._version
            file.write_at(self._archive.data(record), content)
            self._archive.account(record, 0, content)
        for number in range(self._version + 1):
            file.write_at(self._archive.header_offset(number), self._archive.header(number))
        at = self._archive.end
        for piece in _joined(self._archive.directory()):
            file.write_at(at, piece)
            at += len(piece)
        return at


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= _PIECE_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


class SavedObject(Struct, frozen=True, kw_only=True):
    """An object in memory and the layout of its file."""

    #: Writer of the file.
    writer: TorchZipWriter
    #: Range of each stored storage, and its dtype in the file.
    storages: tuple[tuple[StorageSpan, str], ...]
    #: Number of places of its tensors; a container that occurs more than once counts once.
    tensors: int


def lay_out_torch_zip(obj: object, dtype: str | None) -> SavedObject:
    """Pickle an object and lay out its file; no tensor data is read.

    Raises:
        SaveError: It contains something that ``torch.load(weights_only=True)`` would refuse, or a tensor that cannot be
            saved.
    """
    walked = walk_object(obj, _attributes)
    dense = [part for tensor in walked.tensors for part in dense_parts(tensor)]
    spans = collect_spans(dense)
    kept = _quantized_parts(walked.tensors)
    finished = [finished_dtype(span.tensor, None if key in kept else dtype) for key, span in spans.items()]
    pickled = pickle_object(obj, walked, _descriptions(walked.tensors, dense, spans, finished, dtype))
    storages = tuple(zip(spans.values(), finished, strict=True))
    sizes = [(span.end - span.start) * ITEM_BYTES[name] for span, name in storages]
    return SavedObject(writer=TorchZipWriter(pickled, sizes), storages=storages, tensors=walked.places)


def _attributes(value: Any) -> Mapping[str, object] | None:
    if isinstance(value, torch.Tensor):
        refuse_unsupported(value, "", dense=False)
        return vars(value)
    if is_plain(value):
        return None
    raise refusal(value)


def _quantized_parts(tensors: Sequence[torch.Tensor]) -> set[Hashable]:
    """Return the storages of the components of quantized tensors, which are never cast.

    Raises:
        SaveError: The integers of a quantized tensor are also saved as a separate tensor.
    """
    quantized = [dense_parts(tensor) for tensor in tensors if tensor.is_quantized]
    if not quantized:
        return set()
    integers = {storage_key(parts[0]) for parts in quantized}
    for tensor in tensors:
        if not tensor.is_quantized and not integers.isdisjoint(map(storage_key, dense_parts(tensor))):
            raise SaveError("tensors of different dtypes share one storage", found=tensor.dtype)
    return {storage_key(part) for parts in quantized for part in parts}


def _check_gradients(tensor: torch.Tensor, dtype: str | None) -> None:
    """Refuse to cast a tensor with ``requires_grad`` to a dtype without gradients: torch would not load it."""
    own = dtype_name(tensor.dtype)
    why = why_no_cast(own, finished_dtype(tensor, dtype), requires_grad=tensor.requires_grad)
    if why:
        raise SaveError(why)


def _descriptions(
    tensors: Iterable[torch.Tensor],
    dense: Iterable[torch.Tensor],
    spans: Mapping[Hashable, StorageSpan],
    finished: Sequence[str],
    dtype: str | None,
) -> Iterator[Described]:
    """Yield the description of each tensor; ``dense`` yields the ``dense_parts`` of all of them in order."""
    numbers = {key: number for number, key in enumerate(spans)}
    waiting = iter(dense)

    def geometry(part: torch.Tensor) -> Geometry:
        key = storage_key(part)
        span, number = spans[key], numbers[key]
        return Geometry(
            storage=number,
            elements=span.end - span.start,
            dtype=finished[number],
            device=str(part.device),
            start=int(part.storage_offset()) - span.start,
            shape=tuple(part.shape),
            stride=part.stride(),
        )

    for tensor in tensors:
        _check_gradients(tensor, dtype)
        parts = [geometry(part) for part in islice(waiting, count_parts(tensor))]
        yield Described(
            content=describe(tensor, parts),
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            attributes=vars(tensor),
        )


def write_torch_zip(
    saved: SavedObject,
    file: NewFile,
    staging: Staging,
    wrote: Callable[[int], None],
    manifest: ManifestWriter | None = None,
    names: Mapping[str, torch.Tensor] | None = None,
) -> int:
    """Write the file; the caller commits it.

    Args:
        saved: From ``lay_out_torch_zip``.
        file: The destination.
        staging: Buffers for tensors that are cast or on an accelerator.
        wrote: Called with the size of each written piece, in bytes.
        manifest: Receives a hash of each of ``names``.
        names: The tensors by their names in the finished checkpoint.

    Returns:
        Size of the file, in bytes.
    """
    if manifest:
        _expect_tensors(saved, names or {}, manifest, staging)
    writer = saved.writer
    file.reserve(writer.records_bytes, staging.pool)
    with write_queue(writer.records_bytes, staging, wrote) as queue:
        for number, (span, dtype) in enumerate(saved.storages):
            consumer = manifest.in_order(storage_key(span.tensor)) if manifest else None
            queue.write(span.flat(), dtype, writer.offset(number), partial(writer.write, file, number), consumer)
            if manifest:
                manifest.done(storage_key(span.tensor))
    return writer.finish(file)


def _expect_tensors(
    saved: SavedObject, tensors: Mapping[str, torch.Tensor], manifest: ManifestWriter, staging: Staging
) -> None:
    """Announce the tensors to the manifest; those not in row-major order in their storage are hashed now."""
    spans = {storage_key(span.tensor): (span, dtype) for span, dtype in saved.storages}
    for name, tensor in tensors.items():
        span, dtype = spans[storage_key(tensor)]
        if tensor.is_contiguous():
            start = (int(tensor.storage_offset()) - span.start) * ITEM_BYTES[dtype]
            nbytes = tensor.numel() * ITEM_BYTES[dtype]
            stored = storage_key(tensor)
            manifest.expect(name, dtype=dtype, shape=tensor.shape, nbytes=nbytes, stored=stored, start=start)
        else:
            manifest.add(name, dtype=dtype, shape=tensor.shape, pieces=row_major_bytes(tensor, dtype, staging))
