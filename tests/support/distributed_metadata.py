"""Builders of the ``.metadata`` file of torch.distributed.checkpoint directories, which write arguments unchecked."""

from __future__ import annotations

from support.hostile_archives import Call, Global, Raw, encode, pickled

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def _object(module: str, name: str, state: object) -> Raw:
    """Return an object pickled like a dataclass: NEWOBJ, then BUILD."""
    return Raw(encode(Global(module, name)) + b")\x81" + encode(state) + b"b")


def _size(sizes: tuple[object, ...]) -> Call:
    return Call(Global("torch", "Size"), (sizes,))


def chunk_metadata(start: tuple[object, ...], shape: tuple[object, ...]) -> Raw:
    return _object(_METADATA, "ChunkStorageMetadata", {"offsets": _size(start), "sizes": _size(shape)})


def tensor_metadata(
    shape: tuple[object, ...], chunks: object, *, dtype: object = "float32", layout: str = "torch.strided"
) -> Raw:
    """Return the metadata of a tensor; ``dtype`` is a dtype name or any other value."""
    named = Global("torch", dtype) if isinstance(dtype, str) else dtype
    layout_call = Call(Global("torch.serialization", "_get_layout"), (layout,))
    contiguous = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = _object(_METADATA, "TensorProperties", (named, layout_call, False, contiguous, False))
    state = {"properties": properties, "size": _size(shape), "chunks": chunks}
    return _object(_METADATA, "TensorStorageMetadata", state)


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
    if transforms is not None:
        state["transform_descriptors"] = transforms
    return _object(_FILESYSTEM, "_StorageInfo", state)


def distributed_metadata(items: object, stored: object, *, paths: object = None) -> bytes:
    """Return a ``.metadata`` file: metadata and path of each item by name, its location by ``index_key``."""
    checkpoint_id = Call(Global("pathlib", "PosixPath"), ("/", "x"))
    state = {
        "state_dict_metadata": items,
        "planner_data": paths,
        "storage_data": stored,
        "storage_meta": _object(_METADATA, "StorageMeta", {"checkpoint_id": checkpoint_id}),
        "version": "1.0.0",
    }
    return pickled(_object(_METADATA, "Metadata", state))
