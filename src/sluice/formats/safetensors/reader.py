"""The safetensors format: an 8-byte length, a JSON header, then the tensors' bytes.

Layout::

    bytes 0..7      N, the length of the header, unsigned, little-endian
    bytes 8..8+N    the header, UTF-8 JSON, from "{" to "}", padded at its end with white space
    the rest        the data, little-endian; offsets in the header count from its first byte

    {"__metadata__": {"format": "pt"}, "NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

Limits: the header's length, against the file and ``Limits.header_bytes``, before it is read; ``Limits.entries``,
``Limits.dimensions`` and ``Limits.name_bytes`` while it is read.

Refused, as safetensors does: data that is not covered exactly once from its first to its last byte; a size that shape
and dtype contradict; invalid UTF-8 and lone surrogates; metadata that is not text to text. Refused beyond that, because
no writer needs it and readers disagree on it: a name given twice, fields other than the three, white space before the
header, metadata that is ``null``, sizes that torch cannot hold.

Dtypes: torch packs two F4 values in one element, so the last dimension is halved, as in safetensors' own torch reader.
F6 has no dtype in torch: such tensors are leaves that say so. A dtype that the format does not have refuses the file,
as it does in safetensors: nothing says how many bytes it takes, and it may as well be damage.

The tree is a flat dict in the order of the data in the file, whatever the order in the header.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import repeat
from operator import add, sub

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError
from sluice._options import Limits
from sluice.formats.protocol import Checksum
from sluice.formats.safetensors.header import LENGTH_BYTES, Columns, parse_header
from sluice.records import Entry, FileRecord, Index, Storage, UnsupportedValue, elements_of
from sluice.records.bulk import collector_paused, records_from_columns
from sluice.sources.protocol import Source

__all__ = ["SafetensorsFormat"]

#: A length and the start of a JSON object. Eight characters of text are no length but JSON text of another kind.
_START = re.compile(rb'(?![\t\n\r\x20-\x7e]{8}).{8}\{[\t\n\r\x20]*+["}]', re.DOTALL)


class SafetensorsFormat:
    """One safetensors file; see ``Format``."""

    name = "safetensors"

    def matches(self, head: bytes) -> bool:
        return _START.match(head) is not None

    def read_index(self, source: Source, limits: Limits) -> Index:
        with collector_paused():
            columns, metadata, data_start = _read_columns(source, limits)
            columns = _in_file_order(columns)
            tree = _tree(columns, source.path)
            _check_cover(columns, source, data_start)
            return Index(
                format=self.name,
                files=(FileRecord(path=source.path, identity=source.identity),),
                storages=_storages(columns, data_start),
                tree=tree,
                metadata=metadata,
            )

    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:  # noqa: ARG002
        return []  # the format has none

    def locate(
        self,
        source: Source,  # noqa: ARG002 - the protocol's; the header locates every storage of this format
        index: Index,  # noqa: ARG002 - the same
        storages: Iterable[int],  # noqa: ARG002 - the same
    ) -> Mapping[int, int]:
        return {}


def _read_columns(source: Source, limits: Limits) -> tuple[Columns, dict[str, str], int]:
    """Return the header's tensors and metadata, and where the data starts; the header itself is let go."""
    header = _read_header(source, limits)
    columns, metadata = parse_header(header, source.path, limits)
    return columns, metadata, LENGTH_BYTES + len(header)


def _read_header(source: Source, limits: Limits) -> bytes:
    declared = int.from_bytes(source.read_at(0, LENGTH_BYTES), "little")
    available = source.identity.nbytes - LENGTH_BYTES
    if declared > available:
        raise TruncatedError(
            "the file ends inside its header",
            file=source.path,
            offset=0,
            expected=f"{declared} bytes of header",
            found=f"{available} bytes",
        )
    if declared > limits.header_bytes:
        raise LimitError(
            "the header passes the limit 'header_bytes'",
            file=source.path,
            offset=0,
            expected=f"at most {limits.header_bytes}",
            found=declared,
        )
    header = source.read_at(LENGTH_BYTES, declared)
    if header[:1] != b"{":
        problem = "the header does not start with a brace"
        raise FormatError(problem, file=source.path, offset=LENGTH_BYTES, found=header[:16])
    return header


def _in_file_order(columns: Columns) -> Columns:
    """Return the tensors sorted by the place of their data; those without data come before what starts there."""
    names, begins, ends, layouts, unsupported = columns
    if begins[1:] == ends[:-1]:
        return columns  # as writers leave them
    order = sorted(range(len(names)), key=list(zip(begins, ends, strict=True)).__getitem__)
    return Columns(
        names=[names[number] for number in order],
        begins=[begins[number] for number in order],
        ends=[ends[number] for number in order],
        layouts=[layouts[number] for number in order],
        unsupported=unsupported,
    )


def _check_cover(columns: Columns, source: Source, data_start: int) -> None:
    """Raise unless the tensors cover every byte of the data exactly once."""
    position = 0
    for number, begin in enumerate(columns.begins):
        if begin != position:
            raise FormatError(
                "tensors overlap" if begin < position else "bytes belong to no tensor",
                file=source.path,
                tensor=columns.names[number],
                offset=data_start + min(begin, position),
                expected=f"its first byte at {position} of the data",
                found=f"bytes {begin} to {columns.ends[number]}",
            )
        position = columns.ends[number]
    available = source.identity.nbytes - data_start
    if position != available:
        short = position > available
        raise (TruncatedError if short else FormatError)(
            "the file ends before its last tensor" if short else "bytes follow the last tensor",
            file=source.path,
            offset=data_start + min(position, available),
            expected=f"{position} bytes of data",
            found=f"{available} bytes",
        )


def _storages(columns: Columns, data_start: int) -> tuple[Storage, ...]:
    names, begins, ends, *_ = columns
    made = records_from_columns(
        Storage,
        len(names),
        file=repeat(0),
        offset=map(add, begins, repeat(data_start)),
        nbytes=map(sub, ends, begins),
        key=names,
    )
    return tuple(made)


def _tree(columns: Columns, path: str) -> dict[str, Entry | UnsupportedValue]:
    names, layouts = columns.names, columns.layouts
    made = records_from_columns(
        Entry,
        len(names),
        elements=(elements_of(layout.dtype) for layout in layouts),
        shape=(layout.shape for layout in layouts),
        stride=(layout.stride for layout in layouts),
        storage=range(len(names)),
    )
    tree: dict[str, Entry | UnsupportedValue] = dict(zip(names, made, strict=True))
    if len(tree) != len(names) or "__metadata__" in tree:
        twice = next(name for name, count in Counter([*names, "__metadata__"]).items() if count > 1)
        raise FormatError("the name is given twice or reserved", file=path, tensor=twice)
    for name, layout in columns.unsupported.items():
        tree[name] = UnsupportedValue(qualified_name=layout.dtype, reason=layout.unsupported, file=path)
    return tree
