"""Parser of the JSON header of a safetensors file; ``reader`` has the specification.

The header is parsed with regular expressions instead of a JSON parser. Its grammar has no recursion, so regular
expressions describe exactly what is allowed, and nothing else is ever built: no deep nesting, floats, NaN, booleans,
byte-order marks, duplicate fields or lists of a million elements. All repetitions are possessive, so the time is linear
in the length of the header. Tensors are kept in columns: with 100,000 tensors, one record per tensor and parsing step
would double the time and memory.
"""

from __future__ import annotations

import json
import re
from math import prod
from typing import NamedTuple

from sluice._dtypes import ITEM_BYTES
from sluice._errors import CheckpointError, FormatError, LimitError, UnsupportedError
from sluice._options import Limits

__all__ = ["LENGTH_BYTES", "Columns", "parse_header", "parse_texts"]

#: Size of the header length field, in bytes.
LENGTH_BYTES = 8

#: Largest size of a tensor in torch, which counts elements and bytes in signed 64-bit integers.
_TORCH_MAX = 2**63 - 1

_F4_BITS = 4

#: Maximum number of cached layouts. Models have a few dozen; a header of distinct layouts must not double its memory.
_KNOWN_LAYOUTS = 4096

#: torch's name of each dtype of the format.
DTYPES = {
    b"BOOL": "bool",
    b"U8": "uint8",
    b"I8": "int8",
    b"U16": "uint16",
    b"I16": "int16",
    b"U32": "uint32",
    b"I32": "int32",
    b"U64": "uint64",
    b"I64": "int64",
    b"F16": "float16",
    b"BF16": "bfloat16",
    b"F32": "float32",
    b"F64": "float64",
    b"C64": "complex64",
    b"F8_E4M3": "float8_e4m3fn",
    b"F8_E5M2": "float8_e5m2",
    b"F8_E4M3FNUZ": "float8_e4m3fnuz",
    b"F8_E5M2FNUZ": "float8_e5m2fnuz",
    b"F8_E8M0": "float8_e8m0fnu",
    b"F4": "float4_e2m1fn_x2",
}

#: Dtypes of the format that torch does not have, with the size of an element in bits.
FOREIGN_DTYPES = {b"F6_E2M3": 6, b"F6_E3M2": 6}


def _grammar(pattern: bytes) -> re.Pattern[bytes]:
    """Compile ``pattern``, in which a space matches any amount of JSON white space."""
    return re.compile(pattern.replace(b" ", rb"[\x20\t\n\r]*+"))


_CHARACTERS = rb'[^"\\\x00-\x1f]*+'
_STRING = rb'"(' + _CHARACTERS + rb"(?:\\." + _CHARACTERS + rb')*+)"'
_INTEGER = rb"(?:0|[1-9][0-9]{0,19}+)"
_FIELDS = (
    rb'"dtype" : "(' + _CHARACTERS + rb')"',
    rb'"shape" : \[ ((?:' + _INTEGER + rb" (?:, " + _INTEGER + rb" )*+)?+)\]",
    rb'"data_offsets" : \[ (' + _INTEGER + rb") , (" + _INTEGER + rb") \]",
)
#: A name, three fields in any order, and the delimiter after them. A field is followed by a comma and another field, or
#: by the closing brace.
_TENSOR = _grammar(rb" " + _STRING + rb" : \{ (?:(?:" + b"|".join(_FIELDS) + rb') (?:, (?=")|(?=\}))){3}\} ([,}])')
_METADATA = _grammar(rb' "__metadata__" : \{ (\})?+')
_METADATA_ITEM = _grammar(rb" " + _STRING + rb" : " + _STRING + rb" ([,}])")
_TEXTS = _grammar(rb" \{ (\})?+")
_SEPARATOR = _grammar(rb" ([,}])")
_EMPTY = _grammar(rb"\{ \}")
_PADDING = _grammar(rb" ")


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
    #: Layouts of the tensors that torch cannot represent, by name.
    unsupported: dict[str, HeaderLayout]


def parse_header(header: bytes, path: str, limits: Limits) -> tuple[Columns, dict[str, str]]:
    """Parse a header; return its tensors, in header order, and its metadata.

    Args:
        header: The header without its length field; its first byte is an opening brace.
        path: Path of the file, for error messages.
        limits: Bounds on entries, name length and dimensions.

    Raises:
        CheckpointError: The header violates the specification; the subclass states how.
    """
    parser = _HeaderParser(header, path, limits)
    parser.parse()
    return parser.columns, parser.metadata or {}


def parse_texts(data: bytes, path: str, limits: Limits) -> dict[str, str]:
    """Parse a JSON object that maps strings to strings, as ``__metadata__`` does.

    Raises:
        FormatError: The text is anything else, or a key appears twice.
        LimitError: It has more than ``limits.entries`` items.
    """
    parser = _HeaderParser(data, path, limits)
    start = _TEXTS.match(data)
    if start is None:
        raise FormatError("expected a JSON object of strings", file=path)
    texts, end = parser.read_texts(start)
    if _PADDING.fullmatch(data, end) is None:
        raise FormatError("bytes follow a JSON object of strings", file=path)
    return texts


class _HeaderParser:
    """Parser of one header into ``columns`` and ``metadata``."""

    def __init__(self, header: bytes, path: str, limits: Limits) -> None:
        self._header = header
        self._path = path
        self._limits = limits
        self._layouts: dict[tuple[bytes, bytes], HeaderLayout] = {}
        self.columns = Columns([], [], [], [], {})
        self.metadata: dict[str, str] | None = None

    def parse(self) -> None:
        empty = _EMPTY.match(self._header)
        position, after = (empty.end(), b"}") if empty else (1, b",")
        while after == b",":
            match = _TENSOR.match(self._header, position)
            if match is None:
                position, after = self._read_metadata(position)
            else:
                after = self._add(match)
                position = match.end()
        if _PADDING.fullmatch(self._header, position) is None:
            raise self._unexpected("only white space may follow the header's closing brace", position)

    def _add(self, match: re.Match[bytes]) -> bytes:
        """Add the tensor of ``match`` to the columns; return the delimiter after it."""
        raw_name, dtype, shape, begin_text, end_text, after = match.groups()
        names, begins, ends, layouts, unsupported = self.columns
        if len(names) == self._limits.entries or len(raw_name) > self._limits.name_bytes:
            raise self._over_limit("name_bytes" if len(names) < self._limits.entries else "entries", match.start(1))
        name = self._text(raw_name, match.start(1))
        if dtype is None or shape is None or begin_text is None:
            raise self._error(
                FormatError, "dtype, shape and data_offsets must each appear exactly once", match.start(1), name
            )
        layout = self._layouts.get((dtype, shape))
        if layout is None:
            layout = self._layout(dtype, shape, match.start(1), name)
            if len(self._layouts) < _KNOWN_LAYOUTS:
                self._layouts[dtype, shape] = layout
        begin, end = int(begin_text), int(end_text)
        if end - begin != layout.nbytes:
            raise self._error(
                FormatError,
                "the data offsets do not match the shape and dtype",
                match.start(4),
                name,
                expected=f"{layout.nbytes} bytes for shape {list(layout.shape)} of {layout.dtype}",
                found=f"bytes {begin} to {end}",
            )
        if layout.unsupported:
            unsupported[name] = layout
        names.append(name)
        begins.append(begin)
        ends.append(end)
        layouts.append(layout)
        return after

    def _layout(self, dtype: bytes, shape_text: bytes, where: int, name: str) -> HeaderLayout:
        torch_name = DTYPES.get(dtype)
        if torch_name is None and dtype not in FOREIGN_DTYPES:
            found = dtype.decode("utf-8", "backslashreplace")
            known = ", ".join(sorted(map(bytes.decode, (*DTYPES, *FOREIGN_DTYPES))))
            raise self._error(UnsupportedError, "unknown dtype", where, name, expected=known, found=found)
        if shape_text.count(b",") >= self._limits.dimensions:
            raise self._over_limit("dimensions", where)
        shape = [int(size) for size in shape_text.split(b",")] if shape_text else []
        if torch_name is None or (dtype == b"F4" and not (shape and shape[-1] % 2 == 0)):
            return self._foreign_layout(dtype, shape, where, name)
        if dtype == b"F4":
            shape[-1] //= 2
        strides = []
        step = 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        if step * ITEM_BYTES[torch_name] > _TORCH_MAX:
            raise self._error(FormatError, "the shape is larger than torch can represent", where, name, found=shape)
        nbytes = 0 if 0 in shape else step * ITEM_BYTES[torch_name]
        return HeaderLayout(torch_name, tuple(shape), tuple(reversed(strides)), nbytes)

    def _foreign_layout(self, dtype: bytes, shape: list[int], where: int, name: str) -> HeaderLayout:
        """Return the layout of a tensor that the format defines but torch cannot represent."""
        bits = prod(shape) * FOREIGN_DTYPES.get(dtype, _F4_BITS)
        if bits % 8:
            problem = f"the size of an {dtype.decode()} tensor is not a whole number of bytes"
            raise self._error(UnsupportedError, problem, where, name, found=shape)
        if bits // 8 > _TORCH_MAX:
            raise self._error(FormatError, "the shape is larger than torch can represent", where, name, found=shape)
        odd = "torch packs F4 values in pairs, but the last dimension is odd"
        reason = odd if dtype == b"F4" else "torch has no such dtype"
        return HeaderLayout(dtype.decode(), tuple(shape), (), bits // 8, reason)

    def _read_metadata(self, position: int) -> tuple[int, bytes]:
        """Read ``"__metadata__"`` at ``position``; return the position after it and the delimiter there."""
        match = _METADATA.match(self._header, position)
        if match is None:
            raise self._unexpected("expected a tensor with dtype, shape and data_offsets, or __metadata__", position)
        if self.metadata is not None:
            raise self._error(FormatError, "__metadata__ appears twice", position)
        self.metadata, position = self.read_texts(match)
        match = _SEPARATOR.match(self._header, position)
        if match is None:
            raise self._unexpected("expected a comma or a closing brace after __metadata__", position)
        return match.end(), match[1]

    def read_texts(self, start: re.Match[bytes]) -> tuple[dict[str, str], int]:
        """Read the items of an object of strings after its opening brace; return them and the position after them.

        Args:
            start: Match up to the first item; its group is the closing brace of an empty object.
        """
        texts: dict[str, str] = {}
        position, after = start.end(), b"," if start[1] is None else b"}"
        while after == b",":
            match = _METADATA_ITEM.match(self._header, position)
            if match is None:
                raise self._unexpected("__metadata__ does not map strings to strings", position)
            if len(texts) == self._limits.entries:
                raise self._over_limit("entries", position)
            key = self._text(match[1], match.start(1))
            if key in texts:
                raise self._error(FormatError, "a metadata key appears twice", match.start(1), found=repr(key))
            texts[key] = self._text(match[2], match.start(2))
            position, after = match.end(), match[3]
        return texts, position

    def _text(self, raw: bytes, where: int) -> str:
        """Decode a JSON string from the bytes between its quotes."""
        try:
            text = raw.decode()
            if "\\" in text:
                text = str(json.loads(f'"{text}"'))
                text.encode()  # raises for lone surrogates, which escapes can spell
        except ValueError as error:
            raise self._error(FormatError, f"a string is not valid JSON in UTF-8: {error}", where) from error
        return text

    def _over_limit(self, limit: str, where: int) -> CheckpointError:
        expected = f"at most {getattr(self._limits, limit)}"
        return self._error(LimitError, f"the header exceeds the limit {limit!r}", where, expected=expected)

    def _unexpected(self, problem: str, position: int) -> CheckpointError:
        found = self._header[position : position + 60] or "the end of the header"
        return self._error(FormatError, problem, position, found=found)

    def _error(
        self,
        kind: type[CheckpointError],
        problem: str,
        position: int,
        tensor: str | None = None,
        *,
        expected: object = None,
        found: object = None,
    ) -> CheckpointError:
        offset = LENGTH_BYTES + position
        return kind(problem, file=self._path, tensor=tensor, offset=offset, expected=expected, found=found)
