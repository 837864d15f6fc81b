"""Builders of unusual and hostile ``torch.save`` files: a pickle assembler and a zip writer.

Both write their arguments unchecked. ``encode`` returns the opcodes of values, calls of any global and persistent ids;
``build_archive`` writes records whose headers may be wrong; ``torch_archive`` combines both.

Example:
    >>> tensor = tensor_call(storage("0", 4), shape=(2, 2))
    >>> data = torch_archive({"w": tensor}, {"0": bytes(16)})
    >>> data[:2]
    b'PK'
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = [
    "ArchiveRecord",
    "Call",
    "Global",
    "Persistent",
    "Raw",
    "build_archive",
    "encode",
    "pickled",
    "storage",
    "tensor_call",
    "torch_archive",
]


@dataclass(frozen=True, slots=True)
class Global:
    """A global: GLOBAL."""

    #: Its module.
    module: str
    #: Its name in the module.
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call: REDUCE."""

    #: The callable.
    function: object
    #: Its arguments.
    arguments: tuple[object, ...] = ()
    #: State that is set on the result: BUILD.
    state: object = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """A persistent id."""

    #: The id.
    identity: object


@dataclass(frozen=True, slots=True)
class Raw:
    """Verbatim opcodes."""

    #: The opcodes.
    opcodes: bytes


def encode(value: object) -> bytes:
    """Return the opcodes that push ``value``, in protocol 2, without memoization.

    Raises:
        TypeError: The type of the value is not supported.
    """
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
        case _:
            return _encode_plain(value)


def _encode_plain(value: object) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(raw)]) + raw
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        case bytes():
            return b"B" + struct.pack("<I", len(value)) + value
    raise TypeError(f"cannot encode a {type(value).__name__}")


def pickled(value: object) -> bytes:
    """Return a complete pickle of ``value``."""
    return b"\x80\x02" + encode(value) + b"."


def storage(key: object, numel: object, *, kind: str = "FloatStorage", location: object = "cpu") -> Persistent:
    """Return the persistent id of a storage."""
    return Persistent(("storage", Global("torch", kind), key, location, numel))


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
        stride = _contiguous(shape)
    arguments = (source, offset, shape, stride, requires_grad, hooks, *extra)
    return Call(Global("torch._utils", function), arguments)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveRecord:
    """One record of an archive. None stands for the correct value."""

    #: Full name in the central directory.
    name: bytes
    #: The stored bytes.
    data: bytes = b""
    #: Compression method in both headers.
    method: int = 0
    #: Flag bits in both headers.
    flags: int = 0
    #: CRC-32 in both headers.
    crc: int | None = None
    #: Size before compression in both headers.
    nbytes: int | None = None
    #: Stored size in both headers.
    stored_nbytes: int | None = None
    #: Header offset in the central directory.
    header: int | None = None
    #: External attributes.
    attributes: int = 0
    #: Extra field of the local header.
    local_extra: bytes = b""
    #: Extra field of the entry in the central directory.
    extra: bytes = b""
    #: Name in the local header.
    local_name: bytes | None = None
    #: Compression method in the local header.
    local_method: int | None = None
    #: Flag bits in the local header.
    local_flags: int | None = None
    #: Both sizes in the local header.
    local_nbytes: int | None = None
    #: Bytes after the data: a data descriptor, or padding.
    after: bytes = b""


def _or(value: int | None, correct: int) -> int:
    return correct if value is None else value


def _local_header(record: ArchiveRecord) -> bytes:
    name = record.name if record.local_name is None else record.local_name
    fields = (
        _or(record.local_flags, record.flags),
        _or(record.local_method, record.method),
        _or(record.crc, zlib.crc32(record.data)),
        _or(record.local_nbytes, _or(record.stored_nbytes, len(record.data))),
        _or(record.local_nbytes, _or(record.nbytes, len(record.data))),
        len(name),
        len(record.local_extra),
    )
    return struct.pack("<4sHHH4xIIIHH", b"PK\3\4", 20, *fields) + name + record.local_extra


def _entry(record: ArchiveRecord, header: int) -> bytes:
    fields = (
        record.flags,
        record.method,
        _or(record.crc, zlib.crc32(record.data)),
        _or(record.stored_nbytes, len(record.data)),
        _or(record.nbytes, len(record.data)),
        len(record.name),
        len(record.extra),
        record.attributes,
        _or(record.header, header),
    )
    return struct.pack("<4sHHHH4xIIIHH6xII", b"PK\1\2", 20, 20, *fields) + record.name + record.extra


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
    """Return a zip archive.

    Args:
        records: The records, in order.
        prefix: Bytes before the first record; offsets are correct, from the start of the file.
        comment: Comment after the end record.
        entries: Number of entries in the end record; None for the correct value.
        directory_offset: Offset of the central directory in the end record; None for the correct value.
        directory_bytes: Size of the central directory in the end record; None for the correct value.
        zip64: Whether to write a zip64 end record and its locator, with correct values.
    """
    body, directory, count = bytearray(prefix), bytearray(), 0
    for record in records:
        directory += _entry(record, len(body))
        body += _local_header(record) + record.data + record.after
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


def torch_archive(
    value: object,
    storages: Mapping[str, bytes] | None = None,
    *,
    records: Mapping[str, bytes | None] | None = None,
    archive: str = "archive",
) -> bytes:
    """Return a ``torch.save`` file of ``value``.

    Args:
        value: A value for ``encode``, or a complete pickle as bytes.
        storages: Bytes of each storage, by its key.
        records: Records to add or replace, by name in the directory; None omits a record.
        archive: Name of the directory.
    """
    contents: dict[str, bytes | None] = {
        "data.pkl": value if isinstance(value, bytes) else pickled(value),
        "byteorder": b"little",
        **{f"data/{key}": data for key, data in (storages or {}).items()},
        "version": b"3\n",
        **(records or {}),
    }
    return build_archive(
        ArchiveRecord(name=f"{archive}/{name}".encode(), data=data)
        for name, data in contents.items()
        if data is not None
    )
