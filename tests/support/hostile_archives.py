"""Builders of unusual and hostile ``torch.save`` files, which write their arguments unchecked.

``encode`` returns the opcodes of values, calls of any global and persistent ids; ``build_archive`` writes records whose
headers may be wrong; ``torch_archive`` combines both, and ``legacy_file`` writes the format of torch 1.5 and earlier.
"""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any


@dataclass(frozen=True)
class Global:
    """A global: GLOBAL."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A call: REDUCE; ``state`` is set on the result: BUILD."""

    function: object
    arguments: tuple[object, ...] = ()
    state: object = None


@dataclass(frozen=True)
class Persistent:
    """A persistent id."""

    identity: Any


@dataclass(frozen=True)
class Raw:
    """Verbatim opcodes."""

    opcodes: bytes


def encode(value: object) -> bytes:
    """Return the opcodes that push ``value``, in protocol 2, without memoization."""
    match value:
        case Raw(opcodes):
            return opcodes
        case Global(module, name):
            return f"c{module}\n{name}\n".encode()
        case Call(function, arguments, state):
            called = encode(function) + encode(arguments) + b"R"
            return called if state is None else called + encode(state) + b"b"
        case Persistent(identity):
            return encode(identity) + b"Q"
        case dict():
            return b"}(" + b"".join(encode(key) + encode(item) for key, item in value.items()) + b"u"
        case list():
            return b"](" + b"".join(map(encode, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(encode, value)) + b"t"
        case bool() | None | bytes() | str() | float():
            return _encode_plain(value)
        case int():
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(raw)]) + raw
    raise TypeError(f"cannot encode a {type(value).__name__}")


def _encode_plain(value: bool | bytes | str | float | None) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    data = value.encode() if isinstance(value, str) else bytes(value)
    return (b"X" if isinstance(value, str) else b"B") + struct.pack("<I", len(data)) + data


def pickled(value: object) -> bytes:
    """Return a complete pickle of a value."""
    return b"\x80\x02" + encode(value) + b"."


def storage(key: object, numel: object, *, kind: str = "FloatStorage", location: object = "cpu") -> Persistent:
    """Return the persistent id of a storage."""
    return Persistent(("storage", Global("torch", kind), key, location, numel))


def legacy_storage(key: object, numel: object, *, view: object = None, **options: Any) -> Persistent:
    """Return the persistent id of a storage; ``view`` is None, or its key, first element and number of elements."""
    return Persistent((*storage(key, numel, **options).identity, view))


def tensor_call(
    source: object,
    *,
    shape: object = (),
    stride: object = None,
    offset: object = 0,
    requires_grad: object = False,
    hooks: object = None,
    extra: tuple[object, ...] = (),
    function: str = "_rebuild_tensor_v2",
) -> Call:
    """Return the call that rebuilds a tensor; ``stride`` None means contiguous."""
    if hooks is None:
        hooks = Call(Global("collections", "OrderedDict"))
    if stride is None:
        assert isinstance(shape, tuple)
        stride = tuple(accumulate((max(size, 1) for size in shape[:0:-1]), mul, initial=1))[::-1] if shape else ()
    arguments = (source, offset, shape, stride, requires_grad, hooks, *extra)
    return Call(Global("torch._utils", function), arguments)


@dataclass(frozen=True, kw_only=True)
class ArchiveRecord:
    """One record of an archive; None stands for the correct value. Values hold in both headers, ``local_`` in one."""

    name: bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0
    crc: int | None = None
    nbytes: int | None = None
    stored_nbytes: int | None = None
    header: int | None = None
    attributes: int = 0
    local_extra: bytes = b""
    extra: bytes = b""
    local_name: bytes | None = None
    local_method: int | None = None
    local_flags: int | None = None
    local_nbytes: int | None = None
    #: Bytes after the data: a data descriptor, or padding.
    after: bytes = b""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """CRC-32, stored size and size before compression."""
        nbytes = len(self.data)
        return _or(self.crc, zlib.crc32(self.data)), _or(self.stored_nbytes, nbytes), _or(self.nbytes, nbytes)

    def local(self) -> bytes:
        """Return the local header, the data and what follows."""
        name = self.name if self.local_name is None else self.local_name
        crc, *sizes = self.sizes
        head = _or(self.local_flags, self.flags), _or(self.local_method, self.method)
        sizes = [_or(self.local_nbytes, size) for size in sizes]
        fields = struct.pack("<4sHHH4xIIIHH", b"PK\3\4", 20, *head, crc, *sizes, len(name), len(self.local_extra))
        return fields + name + self.local_extra + self.data + self.after

    def entry(self, header: int) -> bytes:
        """Return the entry in the central directory."""
        head = (b"PK\1\2", 20, 20, self.flags, self.method, *self.sizes, len(self.name), len(self.extra))
        tail = (self.attributes, _or(self.header, header))
        return struct.pack("<4sHHHH4xIIIHH6xII", *head, *tail) + self.name + self.extra


class Stream(io.BytesIO):
    """A file without seek, so that sizes follow the data."""

    def seek(self, *_: int) -> int:
        raise OSError("no seeking")


def _or(value: int | None, correct: int) -> int:
    return correct if value is None else value


def build_archive(
    records: Iterable[ArchiveRecord],
    *,
    prefix: bytes = b"",
    comment: bytes = b"",
    entries: int | None = None,
    directory_offset: int | None = None,
    directory_bytes: int | None = None,
    zip64: bool = False,
) -> bytes:
    """Return a zip archive; None stands for the correct value in its end record, ``zip64`` adds a correct one."""
    body, directory, count = bytearray(prefix), bytearray(), 0
    for record in records:
        directory += record.entry(len(body))
        body += record.local()
        count += 1
    start = len(body)
    body += directory
    if zip64:
        at = len(body)
        body += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start)
        body += struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    declared = _or(entries, count)
    sizes = _or(directory_bytes, len(directory)), _or(directory_offset, start)
    body += struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, declared, declared, *sizes, len(comment))
    return bytes(body) + comment


def tar_header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return the header of a member of a tar archive."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def torch_archive(
    value: object,
    storages: Mapping[str, bytes] | None = None,
    *,
    records: Mapping[str, bytes | None] | None = None,
) -> bytes:
    """Return a ``torch.save`` file of a value, or of a complete pickle as bytes.

    ``records`` adds or replaces records, by name in the directory; None omits one.
    """
    contents: dict[str, bytes | None] = {
        "data.pkl": value if isinstance(value, bytes) else pickled(value),
        "byteorder": b"little",
        **{f"data/{key}": data for key, data in (storages or {}).items()},
        "version": b"3\n",
        **(records or {}),
    }
    present = ((f"archive/{name}".encode(), data) for name, data in contents.items() if data is not None)
    return build_archive(ArchiveRecord(name=name, data=data) for name, data in present)


#: System information that torch writes.
_SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def legacy_file(
    value: object,
    storages: Mapping[str, tuple[int, bytes]] | None = None,
    *,
    magic: object = 0x1950A86A20F9469CFC6C,
    version: object = 1001,
    system: object = _SYSTEM,
    keys: object = None,
    trailing: bytes = b"",
) -> bytes:
    """Return a legacy file of a value, or of a complete pickle as bytes; storages by key: number of elements, data."""
    storages = storages or {}
    head = b"".join(map(pickled, (magic, version, system)))
    program = value if isinstance(value, bytes) else pickled(value)
    data = b"".join(struct.pack("<q", count) + raw for count, raw in storages.values())
    return head + program + pickled(list(storages) if keys is None else keys) + data + trailing


# The ``.metadata`` file of a torch.distributed.checkpoint directory; arguments are written unchecked

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def instance(module: str, name: str, state: object) -> Raw:
    """Return an object pickled like a dataclass: NEWOBJ, then BUILD."""
    return Raw(encode(Global(module, name)) + b")\x81" + encode(state) + b"b")


def _size(sizes: tuple[object, ...]) -> Call:
    return Call(Global("torch", "Size"), (sizes,))


def chunk_metadata(start: tuple[object, ...], shape: tuple[object, ...]) -> Raw:
    return instance(_METADATA, "ChunkStorageMetadata", {"offsets": _size(start), "sizes": _size(shape)})


def tensor_metadata(
    shape: tuple[object, ...], chunks: object, *, dtype: object = "float32", layout: str = "torch.strided"
) -> Raw:
    """Return the metadata of a tensor; ``dtype`` is a dtype name or any other value."""
    named = Global("torch", dtype) if isinstance(dtype, str) else dtype
    layout_call = Call(Global("torch.serialization", "_get_layout"), (layout,))
    contiguous = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = instance(_METADATA, "TensorProperties", (named, layout_call, False, contiguous, False))
    state = {"properties": properties, "size": _size(shape), "chunks": chunks}
    return instance(_METADATA, "TensorStorageMetadata", state)


def value_metadata() -> Raw:
    """Return the metadata of an item that is not a tensor."""
    return instance(_METADATA, "BytesStorageMetadata", {})


def index_key(name: object, start: tuple[object, ...] | None = None) -> Raw:
    """Return the key of a stored item."""
    state = {"fqn": name, "index": None} | ({} if start is None else {"offset": _size(start)})
    return instance(_METADATA, "MetadataIndex", state)


def place(file: object, offset: object, length: object, *, transforms: object = None) -> Raw:
    """Return the storage location of an item."""
    state = {"relative_path": file, "offset": offset, "length": length}
    if transforms is not None:
        state["transform_descriptors"] = transforms
    return instance(_FILESYSTEM, "_StorageInfo", state)


def distributed_metadata(items: object, stored: object, *, paths: object = None) -> bytes:
    """Return a ``.metadata`` file: metadata and path of each item by name, its location by ``index_key``."""
    checkpoint_id = Call(Global("pathlib", "PosixPath"), ("/", "x"))
    state = {
        "state_dict_metadata": items,
        "planner_data": paths,
        "storage_data": stored,
        "storage_meta": instance(_METADATA, "StorageMeta", {"checkpoint_id": checkpoint_id}),
        "version": "1.0.0",
    }
    return pickled(instance(_METADATA, "Metadata", state))
