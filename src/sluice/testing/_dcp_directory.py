"""A builder of unusual and hostile torch.distributed.checkpoint directories; it writes its arguments unchecked.

Example:
    >>> item = torch_archive(tensor_call(storage("0", 4), shape=(2, 2)), {"0": bytes(16)})
    >>> halves = [StoredChunk(start=(first, 0), shape=(2, 2), item=item) for first in (0, 2)]
    >>> write_distributed("checkpoint", {"w": StoredTensor(shape=(4, 2), chunks=halves)})
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.testing._archives import Call, Global, Raw, encode, pickled

__all__ = [
    "StoredChunk",
    "StoredTensor",
    "chunk_metadata",
    "distributed_metadata",
    "index_key",
    "place",
    "tensor_metadata",
    "value_metadata",
    "write_distributed",
]

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"

_FIRST_FILE = "__0_0.distcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk of a tensor, stored as an item of its own."""

    #: First element in each dimension.
    start: tuple[int, ...]
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: The bytes of the item, a ``torch.save`` file.
    item: bytes
    #: Name of its file.
    file: str = _FIRST_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor and its chunks."""

    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Its chunks.
    chunks: Sequence[StoredChunk]
    #: Name of its dtype.
    dtype: str = "float32"


def _object(module: str, name: str, state: object) -> Raw:
    """Return an object pickled like a dataclass: NEWOBJ, then BUILD."""
    return Raw(encode(Global(module, name)) + b")\x81" + encode(state) + b"b")


def _size(sizes: tuple[object, ...]) -> Call:
    return Call(Global("torch", "Size"), (sizes,))


def chunk_metadata(start: tuple[object, ...], shape: tuple[object, ...]) -> Raw:
    """Return the metadata of a chunk."""
    return _object(_METADATA, "ChunkStorageMetadata", {"offsets": _size(start), "sizes": _size(shape)})


def tensor_metadata(
    shape: tuple[object, ...], chunks: object, *, dtype: object = "float32", layout: str = "torch.strided"
) -> Raw:
    """Return the metadata of a tensor; ``dtype`` is a dtype name or any other value."""
    named = Global("torch", dtype) if isinstance(dtype, str) else dtype
    layout_call = Call(Global("torch.serialization", "_get_layout"), (layout,))
    contiguous = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = _object(_METADATA, "TensorProperties", (named, layout_call, False, contiguous, False))
    return _object(
        _METADATA, "TensorStorageMetadata", {"properties": properties, "size": _size(shape), "chunks": chunks}
    )


def value_metadata() -> Raw:
    """Return the metadata of an item that is not a tensor."""
    return _object(_METADATA, "BytesStorageMetadata", {})


def index_key(name: object, start: tuple[object, ...] | None = None) -> Raw:
    """Return the key of a stored item."""
    state = {"fqn": name, "index": None} | ({} if start is None else {"offset": _size(start)})
    return _object(_METADATA, "MetadataIndex", state)


def place(file: object, offset: object, length: object, *, transforms: object = None) -> Raw:
    """Return the storage location of an item."""
    state = {"relative_path": file, "offset": offset, "length": length}
    return _object(
        _FILESYSTEM, "_StorageInfo", state | ({} if transforms is None else {"transform_descriptors": transforms})
    )


def distributed_metadata(items: object, stored: object, *, paths: object = None) -> bytes:
    """Return a ``.metadata`` file.

    Args:
        items: Metadata of each item, by name.
        stored: Location of each item, by ``index_key``.
        paths: Path of each item in the saved object, by name.
    """
    state = {
        "state_dict_metadata": items,
        "planner_data": paths,
        "storage_data": stored,
        "storage_meta": _object(
            _METADATA, "StorageMeta", {"checkpoint_id": Call(Global("pathlib", "PosixPath"), ("/", "x"))}
        ),
        "version": "1.0.0",
    }
    return pickled(_object(_METADATA, "Metadata", state))


def write_distributed(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, StoredTensor],
    values: Mapping[str, bytes] | None = None,
    *,
    paths: Mapping[str, tuple[object, ...]] | None = None,
) -> None:
    """Write a directory.

    Args:
        directory: The directory; created if it does not exist.
        tensors: The tensors, by name.
        values: Items of values that are not tensors, by name; all are written to the first file.
        paths: Path of each item in the saved object, by name.
    """
    os.makedirs(directory, exist_ok=True)
    files: defaultdict[str, bytearray] = defaultdict(bytearray)

    def store(file: str, item: bytes) -> Raw:
        offset = len(files[file])
        files[file] += item
        return place(file, offset, len(item))

    items: dict[object, object] = {}
    stored: dict[object, object] = {}
    for name, item in (values or {}).items():
        items[name] = value_metadata()
        stored[index_key(name)] = store(_FIRST_FILE, item)
    for name, tensor in tensors.items():
        chunks = [chunk_metadata(chunk.start, chunk.shape) for chunk in tensor.chunks]
        items[name] = tensor_metadata(tensor.shape, chunks, dtype=tensor.dtype)
        for chunk in tensor.chunks:
            stored[index_key(name, chunk.start)] = store(chunk.file, chunk.item)
    for file, content in files.items():
        with open(os.path.join(directory, file), "wb") as out:
            out.write(content)
    with open(os.path.join(directory, ".metadata"), "wb") as out:
        out.write(distributed_metadata(items, stored, paths=None if paths is None else dict(paths)))
