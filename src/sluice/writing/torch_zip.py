"""Writes a ``torch.save`` zip file: ``data.pkl`` with the object, one stored record for each storage.

Of each storage the file holds what its tensors need and no more. The records are those of torch 2:
``.format_version``, ``.storage_alignment``, ``byteorder`` and ``version`` beside ``data.pkl`` and ``data/0``,
``data/1``, ... Everything but the CRCs is decided before the first byte is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from sluice._dtypes import ITEM_BYTES, dtype_name, why_no_cast
from sluice._errors import SaveError
from sluice.writing.chunks import Staging, row_major_bytes
from sluice.writing.composites import count_parts, dense_parts, made_of
from sluice.writing.durable.replacement import NewFile
from sluice.writing.items import StorageSpan, collect_spans, finished_dtype, refuse_unsupported, storage_key
from sluice.writing.manifest import ManifestWriter
from sluice.writing.pickle_walk import walk_object
from sluice.writing.torch_pickle import is_plain, pickle_object, refusal
from sluice.writing.torch_tensors import Described, Geometry
from sluice.writing.write_queue import write_queue
from sluice.writing.zip_archive import Archive

__all__ = ["SavedObject", "TorchZipWriter", "lay_out_torch_zip", "write_torch_zip"]

#: What torch writes beside the object and its data.
_SMALL_RECORDS = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": sys.byteorder.encode()}

_VERSION = b"3\n"

#: Bytes of the central directory that are written at once, and of a storage that are read again at once.
_PIECE_BYTES = 1 << 20


class TorchZipWriter:
    """A decided file. Storages are numbered as the pickle numbers them."""

    def __init__(self, pickled: bytes | bytearray, sizes: Iterable[int]) -> None:
        """Decide where everything lies.

        Args:
            pickled: ``data.pkl``.
            sizes: Bytes of each storage.
        """
        # torch names the directory like the file, and reads any.
        self._archive = Archive("archive")
        self._small = {"data.pkl": pickled, **_SMALL_RECORDS}
        for name, content in self._small.items():
            self._archive.add(name, len(content))
        self._first = len(self._small)
        for number, nbytes in enumerate(sizes):
            self._archive.add(f"data/{number}", nbytes)
        self._version = self._archive.add("version", len(_VERSION))
        #: Bytes of tensor data.
        self.nbytes = sum(map(self._archive.nbytes, self._storages()))

    def _storages(self) -> range:
        return range(self._first, self._version)

    @property
    def records_bytes(self) -> int:
        """Bytes of the file without its central directory."""
        return self._archive.end

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self._archive.end + sum(map(len, self._archive.directory()))

    def offset(self, storage: int) -> int:
        """Return the first byte of a storage in the file."""
        return self._archive.data(self._first + storage)

    def write(self, file: NewFile, storage: int, at: int, piece: bytes | memoryview, *, account: bool = True) -> None:
        """Write a piece of a storage, from any thread and in any order, each byte once.

        Args:
            file: The file.
            storage: Its number.
            at: Where the piece begins in the storage, in bytes.
            piece: The bytes.
            account: Whether it counts for the CRC now; for many small pieces ``account_written`` takes less time.
        """
        file.write_at(self.offset(storage) + at, piece)
        if account:
            self._archive.account(self._first + storage, at, piece)

    def read(self, file: NewFile, storage: int, at: int, nbytes: int) -> bytes:
        """Return bytes of a storage that were written before, from ``at`` on."""
        return file.read_at(self.offset(storage) + at, nbytes)

    def account_written(self, file: NewFile, storage: int) -> None:
        """Take the CRC of a storage from the file, where all of it was written without."""
        number = self._first + storage
        nbytes = self._archive.nbytes(number)
        at = 0
        while at < nbytes:
            piece = self.read(file, storage, at, min(_PIECE_BYTES, nbytes - at))
            self._archive.account(number, at, piece)
            at += len(piece)

    def finish(self, file: NewFile) -> int:
        """Write what stands around the storages, once all of them are written; return the bytes of the file."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedObject:
    """An object in memory and the file that it becomes."""

    #: The file.
    made: TorchZipWriter
    #: What each storage of it holds, and in which dtype.
    storages: tuple[tuple[StorageSpan, str], ...]
    #: Number of tensor objects in it.
    tensors: int


def lay_out_torch_zip(obj: object, dtype: str | None) -> SavedObject:
    """Pickle an object with its tensors taken out; no tensor data is read.

    Raises:
        SaveError: It holds something that ``torch.load(weights_only=True)`` would refuse, or that has no plain bytes.
    """
    walked = walk_object(obj, _look)
    dense = [part for tensor in walked.tensors for part in dense_parts(tensor)]
    spans = collect_spans(dense)
    kept = _quantized_parts(walked.tensors)
    finished = [finished_dtype(span.tensor, None if key in kept else dtype) for key, span in spans.items()]
    pickled = pickle_object(obj, walked, _descriptions(walked.tensors, dense, spans, finished, dtype))
    storages = tuple(zip(spans.values(), finished, strict=True))
    sizes = [(span.end - span.start) * ITEM_BYTES[name] for span, name in storages]
    return SavedObject(made=TorchZipWriter(pickled, sizes), storages=storages, tensors=len(walked.tensors))


def _look(value: Any) -> Mapping[str, object] | None:
    if isinstance(value, torch.Tensor):
        refuse_unsupported(value, "", dense=False)
        return vars(value)
    if is_plain(value):
        return None
    raise refusal(value)


def _quantized_parts(tensors: Sequence[torch.Tensor]) -> set[Hashable]:
    """Return the storages of what quantized tensors are made of, which is never cast.

    Raises:
        SaveError: The integers of one are a tensor of their own, too.
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
    """Refuse to write a tensor with gradients in a dtype that has none: torch would not load it."""
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
    """Yield what the pickle says of each tensor; ``dense`` are their parts, one after the other."""
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
            made_of=made_of(tensor, parts),
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
    """Write what was decided; the caller commits.

    Args:
        saved: From ``lay_out_torch_zip``.
        file: Where to.
        staging: For what is cast or on an accelerator.
        wrote: Called with the bytes of each piece.
        manifest: Gets a hash of each of ``names``.
        names: The tensors by the names that they have in the finished checkpoint.

    Returns:
        Bytes of the file.
    """
    if manifest:
        _expect_tensors(saved, names or {}, manifest, staging)
    made = saved.made
    file.reserve(made.records_bytes, staging.pool)
    with write_queue(made.records_bytes, staging, wrote) as queue:
        for number, (span, dtype) in enumerate(saved.storages):
            look = manifest.in_order(storage_key(span.tensor)) if manifest else None
            queue.write(span.flat(), dtype, made.offset(number), partial(made.write, file, number), look)
            if manifest:
                manifest.done(storage_key(span.tensor))
    return made.finish(file)


def _expect_tensors(
    saved: SavedObject, tensors: Mapping[str, torch.Tensor], manifest: ManifestWriter, staging: Staging
) -> None:
    """Announce what will be written; what does not lie in row-major order in its storage is hashed now."""
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
