"""The header of a GGUF file: a walk over its metadata and its tensor descriptions.

The header has no length: each value begins where the one before it ends. It is read in pieces, of which one is in
memory at a time. Arrays, such as the vocabulary of a tokenizer with hundreds of thousands of texts, are passed over
without a Python object for each item.
"""

from __future__ import annotations

import struct
from math import prod

from msgspec import Struct

from sluice._defaults import HEADER_PIECE_BYTES
from sluice._dtypes import MAX_SIGNED
from sluice._errors import CheckpointError, FormatError, TruncatedError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.records import Elements, Packing, elements_of
from sluice.sources.protocol import Source

__all__ = ["ALIGNMENT_KEY", "TYPES", "Header", "TensorDescription", "TensorType"]

#: Metadata key of the alignment of tensors.
ALIGNMENT_KEY = "general.alignment"

#: Most bytes that are read at a time. Pieces grow up to it: most headers are either small or mostly vocabulary.
_LARGEST_PIECE_BYTES = 4 << 20

#: Bytes of the smallest metadata entry (key, type, value) and of the smallest tensor description.
_SMALLEST_ENTRY_BYTES = 8 + 4 + 1
_SMALLEST_DESCRIPTION_BYTES = 8 + 4 + 4 + 8

#: Kept of the metadata: bytes of a text, and items of an array of numbers.
_TEXT_BYTES = 1 << 16
_ITEMS = 16

#: Struct codes of the numbers in metadata, by their type.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT32, _STRING, _ARRAY = 4, 8, 9

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class TensorType(Struct, frozen=True):
    """One type of tensors."""

    #: Name, as ggml spells it.
    name: str
    #: Elements of one pack; 1 if each element is stored by itself.
    elements: int
    #: Bytes of one pack.
    nbytes: int
    #: Stored form; None if sluice does not read the type.
    stored: Elements | None = None
    #: Whether the package gguf decodes it.
    package: bool = False


def _plain(name: str, dtype: str, nbytes: int) -> TensorType:
    return TensorType(name, 1, nbytes, elements_of(dtype))


def _packed(name: str, elements: int, nbytes: int, *, package: bool = False) -> TensorType:
    packing = Packing(name=name, elements=elements, nbytes=nbytes)
    return TensorType(name, elements, nbytes, Elements(dtype="float32", packing=packing), package)


#: Types by number. Those without a stored form are intermediate results of computations.
TYPES = {
    0: _plain("F32", "float32", 4),
    1: _plain("F16", "float16", 2),
    2: _packed("Q4_0", 32, 18),
    3: _packed("Q4_1", 32, 20),
    6: _packed("Q5_0", 32, 22),
    7: _packed("Q5_1", 32, 24),
    8: _packed("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: _packed("Q2_K", 256, 84),
    11: _packed("Q3_K", 256, 110),
    12: _packed("Q4_K", 256, 144),
    13: _packed("Q5_K", 256, 176),
    14: _packed("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: _packed("IQ2_XXS", 256, 66, package=True),
    17: _packed("IQ2_XS", 256, 74, package=True),
    18: _packed("IQ3_XXS", 256, 98, package=True),
    19: _packed("IQ1_S", 256, 50, package=True),
    20: _packed("IQ4_NL", 32, 18, package=True),
    21: _packed("IQ3_S", 256, 110, package=True),
    22: _packed("IQ2_S", 256, 82, package=True),
    23: _packed("IQ4_XS", 256, 136, package=True),
    24: _plain("I8", "int8", 1),
    25: _plain("I16", "int16", 2),
    26: _plain("I32", "int32", 4),
    27: _plain("I64", "int64", 8),
    28: _plain("F64", "float64", 8),
    29: _packed("IQ1_M", 256, 56, package=True),
    30: _plain("BF16", "bfloat16", 2),
    34: _packed("TQ1_0", 256, 54, package=True),
    35: _packed("TQ2_0", 256, 66, package=True),
    39: _packed("MXFP4", 32, 17, package=True),
    40: _packed("NVFP4", 64, 36, package=True),
}


class TensorDescription(Struct, frozen=True):
    """One tensor, as the header describes it."""

    #: Its name.
    name: str
    #: Size of each dimension, in elements, the slowest first.
    shape: tuple[int, ...]
    #: Its type; one without a stored form and without bytes for a number that sluice does not know.
    type: TensorType
    #: First byte, counted from the first byte of the data.
    begin: int
    #: Bytes of its data; 0 if the type is unknown.
    nbytes: int
    #: Byte of the description in the file, for messages.
    where: int


class Header:
    """A position in a header; each method moves it on."""

    def __init__(self, source: Source, limits: Limits, begin: int) -> None:
        """Start at byte ``begin``."""
        self._source = source
        self._limits = limits
        self._size = source.identity.nbytes
        self._data = b""
        self._start = begin
        self._next = 0
        #: Multiple of bytes, from the first of the data, at which tensors begin.
        self.alignment = 32

    @property
    def position(self) -> int:
        """The next byte of the file."""
        return self._start + self._next

    def u32(self) -> int:
        """Return the next number of 4 bytes."""
        return int(_U32.unpack(self._take(4))[0])

    def u64(self) -> int:
        """Return the next number of 8 bytes."""
        return int(_U64.unpack(self._take(8))[0])

    def metadata(self, count: int) -> dict[str, str]:
        """Return ``count`` metadata entries as text: numbers, texts, short arrays of numbers; otherwise what they are.

        Raises:
            FormatError: A key is duplicated or not UTF-8, a type is unknown, or the alignment is not a power of two.
            LimitError: The header is larger than ``Limits`` allows.
            TruncatedError: The file ends before the end of the metadata.
        """
        self._check_count(count, _SMALLEST_ENTRY_BYTES, "metadata entries")
        self._check_limit("entries", count)
        texts: dict[str, str] = {}
        for _ in range(count):
            where = self.position
            key = self._text("a metadata key")
            if key in texts:
                raise self.error(FormatError, "a metadata key is duplicated", where, found=repr(key))
            kind = self.u32()
            texts[key] = self._value(kind)
            if key == ALIGNMENT_KEY:
                self.alignment = int(texts[key]) if kind == _UINT32 else 0
                if self.alignment == 0 or self.alignment & (self.alignment - 1):
                    found = f"{texts[key]} of metadata type {kind}"
                    expected = f"a power of two of type {_UINT32}"
                    raise self.error(FormatError, "the alignment is invalid", where, expected=expected, found=found)
        return texts

    def descriptions(self, count: int) -> list[TensorDescription]:
        """Return the descriptions of ``count`` tensors.

        Raises:
            FormatError: A description contradicts itself or another one.
            LimitError: The header is larger than ``Limits`` allows.
            TruncatedError: The file ends before the end of the descriptions.
        """
        self._check_count(count, _SMALLEST_DESCRIPTION_BYTES, "tensors")
        self._check_limit("entries", count)
        names: set[str] = set()
        found = []
        for _ in range(count):
            found.append(self._description())
            if found[-1].name in names:
                raise self.error(FormatError, "the name is duplicated", found[-1].where, tensor=found[-1].name)
            names.add(found[-1].name)
        return found

    def _description(self) -> TensorDescription:
        where = self.position
        name = self._text("the name of a tensor")
        rank = self.u32()
        if rank > self._limits.dimensions:
            self._check_limit("dimensions", rank, tensor=name)
        sizes = struct.unpack(f"<{rank}Q", self._take(8 * rank))
        number, begin = self.u32(), self.u64()
        kind = TYPES.get(number) or TensorType(f"type {number}", 1, 0)
        if prod(max(size, 1) for size in sizes) * 8 > MAX_SIGNED:
            problem = "the shape is larger than torch can represent"
            raise self.error(FormatError, problem, where, tensor=name, found=list(reversed(sizes)))
        row = sizes[0] if sizes else 1
        if row % kind.elements:
            raise self.error(
                FormatError,
                f"the rows are not whole packs of type {kind.name}",
                where,
                tensor=name,
                expected=f"rows of a multiple of {kind.elements} elements",
                found=f"rows of {row}",
            )
        nbytes = prod(sizes) // kind.elements * kind.nbytes
        if begin % self.alignment:
            expected = f"a multiple of {self.alignment} bytes"
            raise self.error(
                FormatError, "the offset is not aligned", where, tensor=name, expected=expected, found=begin
            )
        return TensorDescription(name, tuple(reversed(sizes)), kind, begin, nbytes, where)

    def _value(self, kind: int) -> str:
        """Return a metadata value as text."""
        if kind in _NUMBERS:
            code = "<" + _NUMBERS[kind]
            return str(struct.unpack(code, self._take(struct.calcsize(code)))[0])
        if kind == _STRING:
            nbytes = self.u64()
            if nbytes > _TEXT_BYTES:
                self._skip(nbytes)
                return f"text of {nbytes} bytes"
            return self._take(nbytes).decode("utf-8", "replace")
        if kind == _ARRAY:
            return self._array()
        raise self.error(FormatError, "unknown type of a metadata value", self.position - 4, found=kind)

    def _array(self) -> str:
        where = self.position
        kind, count = self.u32(), self.u64()
        if kind in _NUMBERS:
            item = struct.calcsize("<" + _NUMBERS[kind])
            if count <= _ITEMS:
                return str(list(struct.unpack(f"<{count}{_NUMBERS[kind]}", self._take(item * count))))
            self._skip(item * count)
            return f"array of {count} numbers"
        if kind == _STRING:
            self._check_count(count, 8, "texts")
            self._skip_texts(count)
            return f"array of {count} texts"
        raise self.error(FormatError, "the items of a metadata array are neither numbers nor texts", where, found=kind)

    def _skip_texts(self, count: int) -> None:
        length_at = _U64.unpack_from
        while count:
            self._check_room(8)
            if self._next + 8 > len(self._data):
                self._read(8)
            data, at, last = self._data, self._next, len(self._data) - 8
            while count and at <= last:
                at += 8 + length_at(data, at)[0]
                count -= 1
            self._next = at
        self._check_room(0)

    def _text(self, what: str) -> str:
        where = self.position
        nbytes = self.u64()
        if nbytes > self._limits.name_bytes:
            self._check_limit("name_bytes", nbytes)
        try:
            return self._take(nbytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(FormatError, f"{what} is not UTF-8", where, found=error.object[:16]) from None

    def _check_count(self, count: int, smallest_bytes: int, what: str) -> None:
        """Refuse a count of items that the file has no room for, before the first of them."""
        if count > (self._size - self.position) // smallest_bytes:
            raise self._ended(f"{count} {what}")

    def _take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        if self._next + nbytes > len(self._data):
            self._read(nbytes)
        first = self._next
        self._next += nbytes
        return self._data[first : self._next]

    def _skip(self, nbytes: int) -> None:
        """Pass over bytes, which are not read unless they are in memory."""
        self._check_room(nbytes)
        self._next += nbytes

    def _read(self, nbytes: int) -> None:
        """Read the piece that begins at the position, with at least ``nbytes`` bytes."""
        self._check_room(nbytes)
        begin = self.position
        # As many bytes again as the header has had so far.
        piece = min(max(begin, HEADER_PIECE_BYTES), _LARGEST_PIECE_BYTES)
        self._data = self._source.read_at(begin, min(max(nbytes, piece), self._size - begin))
        self._start, self._next = begin, 0

    def _check_room(self, nbytes: int) -> None:
        begin = self.position
        if begin + nbytes > self._size:
            raise self._ended(f"{nbytes} bytes")
        if begin + nbytes > self._limits.header_bytes:
            self._check_limit("header_bytes", begin + nbytes)

    def _ended(self, expected: str) -> CheckpointError:
        problem, found = "the file ends inside its header", f"{max(0, self._size - self.position)} bytes"
        return self.error(TruncatedError, problem, self.position, expected=expected, found=found)

    def _check_limit(self, limit: str, found: int, *, tensor: str | None = None) -> None:
        file, offset = self._source.path, self.position
        check_limit(self._limits, limit, found, "the header", file=file, tensor=tensor, offset=offset)

    def error(
        self,
        kind: type[CheckpointError],
        problem: str,
        offset: int,
        *,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> CheckpointError:
        """Return an error that names the file."""
        return kind(problem, file=self._source.path, tensor=tensor, offset=offset, expected=expected, found=found)
