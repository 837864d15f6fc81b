r"""Decoder of the JSON header of a safetensors file; ``reader`` has the specification.

msgspec builds the declared types and nothing else: no deep nesting, floats, NaN or booleans. Tensors are kept in
columns: with 100,000 tensors, one record per tensor and step would double the time and memory.

Tied names: tensors of the format may not share bytes, so a tensor with several names is stored under one of them.
``save_model`` of the safetensors library maps each other name to the stored one in ``__metadata__``:
``{"head": "embedding"}``. Nothing distinguishes such an item from other metadata (``{"task": "embedding"}``), so it
never becomes a name of the file; it is only looked up for a caller that knows the name
(``OpenCheckpoint.stored_names``).

Files of sluice have those items, and declare them in one more item, whose text is a JSON object::

    {"__metadata__": {"sluice.tied_names": "{\"head\":\"embedding\"}", "head": "embedding", ...}, ...}

Names that are declared in this way are names of the checkpoint. Tools that split or join files copy ``__metadata__`` to
files with other tensors, so a declaration holds for all files of a checkpoint together: ``checkpoint.declarations``
decides which of the names count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from sluice._dtypes import ITEM_BYTES, MAX_SIGNED
from sluice._errors import CheckpointError, FormatError, UnsupportedError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.formats.strict_json import count_strings, decode_json, has_longer_list, without_strings
from sluice.records.geometry import contiguous_stride

__all__ = ["DTYPES", "LENGTH_BYTES", "Columns", "TiedNames", "declare_ties", "parse_header"]

#: Size of the header length field, in bytes.
LENGTH_BYTES = 8

_F4_BITS = 4

#: Key of the declaration of tied names in ``__metadata__``.
_KEY = "sluice.tied_names"

#: Maximum number of cached layouts. Models have a few dozen; a header of distinct layouts must not double its memory.
_KNOWN_LAYOUTS = 4096

#: Strings of one tensor: its name, the names of three fields, and the dtype.
_TENSOR_STRINGS = 5

#: torch's name of each dtype of the format.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}

#: Dtypes of the format that torch does not have, with the size of an element in bits.
FOREIGN_DTYPES = {"F6_E2M3": 6, "F6_E3M2": 6}

_Size = Annotated[int, Meta(ge=0, le=MAX_SIGNED)]


class _Member(Struct, gc=False):
    """A member of a header: a tensor, or ``__metadata__``, whose items are text under any name."""

    dtype: str | None = None
    shape: tuple[_Size, ...] | str = ""
    data_offsets: tuple[_Size, _Size] | str = ""


class _Header(Struct):
    """A header, of which only the metadata is decoded."""

    metadata: dict[str, str] = field(default_factory=dict, name="__metadata__")


class HeaderLayout(NamedTuple):
    """Layout of a tensor from its dtype and shape in the header; tensors with equal fields share one."""

    #: torch's name of the dtype; the format's name for unsupported tensors.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Row-major strides, in elements; empty for unsupported tensors.
    stride: tuple[int, ...]
    #: Size of the data, in bytes.
    nbytes: int
    #: Reason why torch cannot represent the tensor; empty if it can.
    unsupported: str = ""


class Columns(NamedTuple):
    """The tensors of a header, one list for each property."""

    #: Names.
    names: list[str]
    #: Offset of the first byte of each tensor, in bytes from the start of the data.
    begins: list[int]
    #: Offset after the last byte of each tensor, in bytes from the start of the data.
    ends: list[int]
    #: Dtypes, shapes and sizes.
    layouts: list[HeaderLayout]


def parse_header(header: bytes, path: str, limits: Limits) -> tuple[Columns, TiedNames]:
    """Parse a header; return its tensors, in header order, and its metadata with the tied names that it declares.

    Args:
        header: The header without its length field; its first byte is an opening brace.
        path: Path of the file, for error messages.
        limits: Bounds on entries, name length and dimensions.

    Raises:
        CheckpointError: The header violates the specification; the subclass states how.
    """
    strings = count_strings(header)
    least = (strings + 1) // (_TENSOR_STRINGS + 2)  # entries: an item of metadata has two strings
    check_limit(limits, "entries", least, "the header", file=path, offset=LENGTH_BYTES)
    dimensions = limits.dimensions + has_longer_list(header, limits.dimensions)
    check_limit(limits, "dimensions", dimensions, "the header", file=path, offset=LENGTH_BYTES)
    members = decode_json(header, dict[str, _Member], "the header", path)
    has_metadata = members.pop("__metadata__", None) is not None
    metadata = decode_json(header, _Header, "the header", path).metadata if has_metadata else {}
    check_limit(limits, "entries", max(len(members), len(metadata)), "the header", file=path, offset=LENGTH_BYTES)
    layouts = _Layouts(path, limits)
    columns = Columns([], [], [], [])
    for name, member in members.items():
        layouts.add(name, member, columns)
    if strings != _TENSOR_STRINGS * len(members) + has_metadata + 2 * len(metadata):
        raise FormatError("a name or a field is given twice, or a tensor has other fields", file=path)
    if b"-0" in header and b"-" in without_strings(header):
        raise FormatError("a size or an offset is negative", file=path)
    return columns, _read_ties(metadata, path, limits) if _KEY in metadata else TiedNames({}, metadata, ())


class _Layouts(Struct, frozen=True):
    """The layouts of the tensors of one header."""

    path: str
    limits: Limits
    known: dict[tuple[str, tuple[int, ...]], HeaderLayout] = {}

    def add(self, name: str, member: _Member, columns: Columns) -> None:
        """Add a tensor to the columns."""
        dtype, shape, offsets = member.dtype, member.shape, member.data_offsets
        if dtype is None or isinstance(shape, str) or isinstance(offsets, str):
            expected = "dtype, shape and data_offsets"
            raise self._error(FormatError, "a tensor lacks a field, or one has another type", name, expected=expected)
        if len(name.encode()) > self.limits.name_bytes:
            nbytes = len(name.encode())
            check_limit(self.limits, "name_bytes", nbytes, "the header", file=self.path, offset=LENGTH_BYTES)
        layout = self.known.get((dtype, shape))
        if layout is None:
            layout = self._layout(dtype, shape, name)
            if len(self.known) < _KNOWN_LAYOUTS:
                self.known[dtype, shape] = layout
        begin, end = offsets
        if end - begin != layout.nbytes:
            raise self._error(
                FormatError,
                "the data offsets do not match the shape and dtype",
                name,
                expected=f"{layout.nbytes} bytes for shape {list(layout.shape)} of {layout.dtype}",
                found=f"bytes {begin} to {end}",
            )
        columns.names.append(name)
        columns.begins.append(begin)
        columns.ends.append(end)
        columns.layouts.append(layout)

    def _layout(self, dtype: str, shape: tuple[int, ...], name: str) -> HeaderLayout:
        torch_name = DTYPES.get(dtype)
        if torch_name is None and dtype not in FOREIGN_DTYPES:
            known = ", ".join(sorted((*DTYPES, *FOREIGN_DTYPES)))
            raise self._error(UnsupportedError, "unknown dtype", name, expected=known, found=dtype)
        odd = dtype == "F4" and not (shape and shape[-1] % 2 == 0)
        bits = FOREIGN_DTYPES.get(dtype, _F4_BITS) if odd or torch_name is None else 8 * ITEM_BYTES[torch_name]
        if dtype == "F4" and not odd:
            shape = (*shape[:-1], shape[-1] // 2)
        if prod(filter(None, shape)) * bits // 8 > MAX_SIGNED:  # as if no size were 0
            raise self._error(FormatError, "the shape is larger than torch can represent", name, found=list(shape))
        bits *= prod(shape)
        if bits % 8:
            problem = f"the size of an {dtype} tensor is not a whole number of bytes"
            raise self._error(UnsupportedError, problem, name, found=list(shape))
        if odd or torch_name is None:
            reason = (
                "torch packs F4 values in pairs, but the last dimension is odd" if odd else "torch has no such dtype"
            )
            return HeaderLayout(dtype, shape, (), bits // 8, reason)
        return HeaderLayout(torch_name, shape, contiguous_stride(shape), bits // 8)

    def _error(
        self, kind: type[CheckpointError], problem: str, name: str, *, expected: object = None, found: object = None
    ) -> CheckpointError:
        return kind(problem, file=self.path, tensor=name, offset=LENGTH_BYTES, expected=expected, found=found)


class TiedNames(NamedTuple):
    """The tied names that the metadata of a file declares."""

    #: Name of the stored tensor, by further name; the file may have neither.
    stored: Mapping[str, str]
    #: The metadata without the declaration and the items that it covers.
    metadata: Mapping[str, str]
    #: A sentence on a declaration that cannot be read.
    notes: tuple[str, ...]


def declare_ties(ties: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file with tied names: ``ties`` maps each name that is not stored to the stored one."""
    own = {key: text for key, text in metadata.items() if key != _KEY}
    if not ties:
        return own
    return {**ties, **own, _KEY: json.dumps(dict(ties), ensure_ascii=False, separators=(",", ":"))}


def _read_ties(metadata: Mapping[str, str], path: str, limits: Limits) -> TiedNames:
    """Return the tied names that the metadata of a file declares.

    Args:
        metadata: ``__metadata__``, with a declaration.
        path: Path of the file, for error messages.
        limits: Bounds on names.

    Raises:
        LimitError: The declaration has more names than the limits allow.
    """
    data = metadata[_KEY].encode()
    strings = count_strings(data)
    check_limit(limits, "entries", (strings + 1) // 2, "the header", file=path, offset=LENGTH_BYTES)
    with suppress(FormatError):
        declared = decode_json(data, dict[str, str], "the declaration of tied names", path)
        if strings == 2 * len(declared):
            rest = {key: text for key, text in metadata.items() if key != _KEY and declared.get(key) != text}
            return TiedNames(declared, rest, ())
    rest = {key: text for key, text in metadata.items() if key != _KEY}
    return TiedNames({}, rest, (f"The metadata {_KEY!r} is not a JSON object of names and was ignored.",))
