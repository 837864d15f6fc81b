"""Writes a ``torch.save`` zip file: ``data.pkl`` with the object, one stored record for each storage, aligned to 64.

The pickle names only what ``torch.load(weights_only=True)`` allows. Of each storage the file holds what its tensors
need and no more. The records are those of torch 2: ``.format_version``, ``.storage_alignment``, ``byteorder``,
``version`` and ``.data/serialization_id`` beside ``data.pkl`` and ``data/0``, ``data/1``, ...
"""

from __future__ import annotations

import codecs
import collections
import io
import pickle
import sys
import zipfile
from collections.abc import Callable, Hashable, Mapping
from typing import IO, Any

import torch
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2, _rebuild_tensor_v3

from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice._errors import SaveError
from sluice.writing._chunks import Staging, chunks
from sluice.writing._items import Span, collect_spans, finished_dtype, refuse_unsupported, storage_key
from sluice.writing._manifest import ManifestWriter
from sluice.writing._replacement import Replacement, saving

__all__ = ["TorchZip", "lay_out_torch_zip", "write_torch_zip"]

_ALIGNMENT_BYTES = 64

#: Protocol of ``torch.save``.
_PROTOCOL = 2

#: Size of a zip local header without name and extra field, and of the extra field for sizes beyond 4 GiB.
_LOCAL_HEADER_BYTES, _ZIP64_EXTRA_BYTES = 30, 20

#: The directory that all records are in. torch takes the file's own name, and reads any.
_TOP = "archive"

#: An extra field has a header of two 16-bit numbers; this one is torch's for padding ("FB").
_EXTRA_HEADER_BYTES, _EXTRA_KIND = 4, b"FB"

#: Zip keeps the time of each record; a constant makes equal content equal files. It is the earliest that zip knows.
_EPOCH = (1980, 1, 1, 0, 0, 0)

#: What torch writes beside the object and its data.
_SMALL_RECORDS = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": sys.byteorder.encode()}

#: torch's storage class for each dtype that has one; the others are untyped bytes with a dtype beside them.
_STORAGE_CLASSES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}

#: What is pickled as it is: its reduction names nothing but itself and plain values.
_PLAIN = frozenset({collections.OrderedDict, torch.Size, torch.device, torch.dtype, complex, bytearray})

#: All that the pickle may name. Bytes become a call of ``codecs.encode`` in protocol 2.
_NAMED = (
    _rebuild_parameter,
    _rebuild_tensor_v2,
    _rebuild_tensor_v3,
    codecs.encode,
    set,
    frozenset,
    torch.storage.UntypedStorage,
    *_PLAIN,
    *(getattr(torch, name) for name in _STORAGE_CLASSES.values()),
)


class TorchZip:
    """A decided file."""

    def __init__(self, pickled: bytes, storages: list[tuple[Span, str]], tensors: int) -> None:
        #: ``data.pkl``.
        self.pickled = pickled
        #: Number of tensor objects in it.
        self.tensors = tensors
        #: What each storage record holds, and in which dtype; the record's name is its position.
        self.storages = storages

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum((span.end - span.start) * ITEM_BYTES[dtype] for span, dtype in self.storages)


def lay_out_torch_zip(obj: object, dtype: str | None) -> TorchZip:
    """Pickle an object with its tensors taken out; no tensor data is read.

    Raises:
        SaveError: It holds something that ``torch.load(weights_only=True)`` would refuse, or that has no plain bytes.
    """
    tensors: dict[str, torch.Tensor] = {}
    _Pickler(io.BytesIO(), {}, dtype, tensors).dump(obj)  # finds every tensor, and refuses early
    spans = collect_spans(tensors)
    out = io.BytesIO()
    _Pickler(out, spans, dtype, {}).dump(obj)
    return TorchZip(
        out.getvalue(), [(span, finished_dtype(span.tensor, dtype)) for span in spans.values()], len(tensors)
    )


class _StorageReference:
    """Stands for a storage in the pickle: it becomes a persistent id."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its geometry over a numbered storage.

    With no spans it only collects the tensors that it meets.
    """

    def __init__(
        self, out: io.BytesIO, spans: dict[Hashable, Span], dtype: str | None, tensors: dict[str, torch.Tensor]
    ) -> None:
        super().__init__(out, _PROTOCOL)
        self._spans = spans
        self._numbers = {key: number for number, key in enumerate(spans)}
        self._dtype = dtype
        self._tensors = tensors

    def reducer_override(self, value: Any) -> Any:
        """Reduce what is no builtin; called by the C pickler."""
        if isinstance(value, torch.Tensor):
            return self._reduce_tensor(value)
        if type(value) in _PLAIN or any(value is named for named in _NAMED):
            return NotImplemented
        if isinstance(value, type) or callable(value):
            raise SaveError("only tensors and plain values are saved", found=f"{getattr(value, '__qualname__', value)}")
        raise SaveError("only tensors and plain values are saved", found=f"an object of {type(value).__qualname__}")

    def persistent_id(self, value: Any) -> Any:
        """Return torch's description of a storage."""
        if not isinstance(value, _StorageReference):
            return None
        tensor = value.tensor
        key = storage_key(tensor)
        span = self._spans.get(key)
        number = self._numbers.get(key, 0)
        count = span.end - span.start if span else 0
        dtype = finished_dtype(tensor, self._dtype)
        if dtype in _STORAGE_CLASSES:
            return ("storage", getattr(torch, _STORAGE_CLASSES[dtype]), str(number), str(tensor.device), count)
        nbytes = count * ITEM_BYTES[dtype]
        return ("storage", torch.storage.UntypedStorage, str(number), str(tensor.device), nbytes)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter):
            return _rebuild_parameter, (tensor.detach(), tensor.requires_grad, collections.OrderedDict())
        refuse_unsupported(tensor, "")
        self._tensors[str(len(self._tensors))] = tensor
        span = self._spans.get(storage_key(tensor))
        start = int(tensor.storage_offset()) - (span.start if span else 0)
        geometry = (_StorageReference(tensor), start, tuple(tensor.shape), tensor.stride())
        hooks: collections.OrderedDict[str, object] = collections.OrderedDict()
        dtype = finished_dtype(tensor, self._dtype)
        if dtype in _STORAGE_CLASSES:
            return _rebuild_tensor_v2, (*geometry, tensor.requires_grad, hooks)
        return _rebuild_tensor_v3, (*geometry, tensor.requires_grad, hooks, torch_dtype(dtype))


def write_torch_zip(
    made: TorchZip,
    file: Replacement,
    staging: Staging,
    wrote: Callable[[int], None],
    manifest: ManifestWriter | None = None,
    names: Mapping[str, torch.Tensor] | None = None,
) -> int:
    """Write what was decided; the caller commits.

    Args:
        made: From ``lay_out_torch_zip``.
        file: Where to.
        staging: For what is cast or on an accelerator.
        wrote: Called with the bytes of each piece.
        manifest: Gets a hash of each of ``names``.
        names: The tensors by the names that they have in the finished checkpoint.

    Returns:
        Bytes of the file.
    """
    if manifest:
        _expect_tensors(made, names or {}, manifest, staging)
    file.reserve(made.nbytes)
    with saving(file.path), file.stream() as stream:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            _write_record(archive, stream, "data.pkl", made.pickled)
            for name, content in _SMALL_RECORDS.items():
                _write_record(archive, stream, name, content)
            for number, (span, dtype) in enumerate(made.storages):
                nbytes = (span.end - span.start) * ITEM_BYTES[dtype]
                with archive.open(_record(stream, f"data/{number}", nbytes), "w", force_zip64=_is_large(nbytes)) as out:
                    pieces = chunks(span.flat(), dtype, staging)
                    for piece in manifest.through(storage_key(span.tensor), pieces) if manifest else pieces:
                        out.write(piece)
                        wrote(len(piece))
            _write_record(archive, stream, "version", b"3\n")
        return stream.tell()


def _expect_tensors(
    made: TorchZip, tensors: Mapping[str, torch.Tensor], manifest: ManifestWriter, staging: Staging
) -> None:
    """Announce what will be written; what does not lie in row-major order in its storage is hashed now."""
    spans = {storage_key(span.tensor): (span, dtype) for span, dtype in made.storages}
    for name, tensor in tensors.items():
        span, dtype = spans[storage_key(tensor)]
        if tensor.is_contiguous():
            start = (int(tensor.storage_offset()) - span.start) * ITEM_BYTES[dtype]
            nbytes = tensor.numel() * ITEM_BYTES[dtype]
            stored = storage_key(tensor)
            manifest.expect(name, dtype=dtype, shape=tensor.shape, nbytes=nbytes, stored=stored, start=start)
        else:
            manifest.add(name, dtype=dtype, shape=tensor.shape, pieces=chunks(tensor, dtype, staging))


def _write_record(archive: zipfile.ZipFile, stream: IO[bytes], name: str, content: bytes) -> None:
    archive.writestr(_record(stream, name, len(content)), content)


def _record(stream: IO[bytes], name: str, nbytes: int) -> zipfile.ZipInfo:
    """Return a record whose data will begin at a multiple of 64, as direct reads and mappings want it."""
    record = zipfile.ZipInfo(f"{_TOP}/{name}", _EPOCH)
    record.file_size = nbytes
    extra = _ZIP64_EXTRA_BYTES if _is_large(nbytes) else 0
    begin = stream.tell() + _LOCAL_HEADER_BYTES + len(record.filename) + extra + _EXTRA_HEADER_BYTES
    padding = -begin % _ALIGNMENT_BYTES
    record.extra = _EXTRA_KIND + padding.to_bytes(2, "little") + b"Z" * padding
    return record


def _is_large(nbytes: int) -> bool:
    return nbytes >= zipfile.ZIP64_LIMIT
