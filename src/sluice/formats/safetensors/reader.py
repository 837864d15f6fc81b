"""The safetensors format: an 8-byte length, a JSON header, then the data of the tensors.

Layout::

    bytes 0..8      N, the length of the header, unsigned, little-endian
    bytes 8..8+N    the header: a JSON object in UTF-8, from "{" to "}", padded at its end with white space
    the rest        the data, little-endian; offsets in the header count from its first byte

    {"__metadata__": {"format": "pt"}, "NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

Limits: the length of the header, against the file size and ``Limits.header_bytes``, before the header is read;
``Limits.entries``, ``Limits.dimensions`` and ``Limits.name_bytes`` while it is parsed.

Refused, as in the safetensors library: tensors that do not cover every byte of the data exactly once; data offsets that
do not match the shape and dtype; invalid UTF-8 and lone surrogates; metadata that does not map strings to strings.
Refused in addition, because no writer needs it and readers disagree on it: duplicate names; fields other than the
three; white space before the header; metadata that is ``null``; sizes that torch cannot represent; negative zeros.

Dtypes: torch packs two F4 values into one element, so the last dimension is halved, as in the torch reader of the
safetensors library. torch has no F6 dtypes: such tensors become ``UnsupportedValue`` leaves. A dtype outside the format
refuses the file, as in the safetensors library: its element size is unknown, so the file may be damaged.

The tree is a flat dict in data order, regardless of the order in the header. Tied names (``ties``) are not in it.
"""

from __future__ import annotations

from itertools import repeat
from operator import add, sub

from sluice._errors import FormatError, TruncatedError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.formats.protocol import LocatedByIndex
from sluice.formats.safetensors.header import LENGTH_BYTES, Columns, parse_header
from sluice.records import Entry, FileRecord, Index, Storage, UnsupportedValue, collector_paused, elements_of
from sluice.sources.protocol import Source

__all__ = ["SafetensorsFormat"]


class SafetensorsFormat(LocatedByIndex):
    """The format of a single safetensors file; see ``Format``."""

    name = "safetensors"

    def read_index(self, source: Source, limits: Limits) -> Index:
        with collector_paused():
            header = _read_header(source, limits)
            data_start = LENGTH_BYTES + len(header)
            columns, ties = parse_header(header, source.path, limits)
            del header  # of up to a hundred megabytes
            if columns.begins[1:] != columns.ends[:-1]:  # few writers leave them unsorted
                columns = _in_file_order(columns)
            tree = _tree(columns, source.path)
            _check_cover(columns, source, data_start)
            starts = map(add, columns.begins, repeat(data_start))
            sizes = map(sub, columns.ends, columns.begins)
            return Index(
                format=self.name,
                files=(FileRecord(path=source.path, identity=source.identity),),
                storages=tuple(map(Storage, repeat(0), starts, sizes, columns.names)),
                tree=tree,
                metadata=ties.metadata,
                notes=ties.notes,
                tied=ties.stored,
                located=True,
            )


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
    check_limit(limits, "header_bytes", declared, "the header", file=source.path, offset=0)
    header = source.read_at(LENGTH_BYTES, declared)
    if header[:1] != b"{":
        problem = "the header does not start with a brace"
        raise FormatError(problem, file=source.path, offset=LENGTH_BYTES, found=header[:16])
    return header


def _in_file_order(columns: Columns) -> Columns:
    """Return the tensors sorted by data offset; an empty tensor precedes the tensor that starts at its offset."""
    names, begins, ends, layouts = columns
    order = sorted(range(len(names)), key=list(zip(begins, ends, strict=True)).__getitem__)
    return Columns(
        names=[names[position] for position in order],
        begins=[begins[position] for position in order],
        ends=[ends[position] for position in order],
        layouts=[layouts[position] for position in order],
    )


def _check_cover(columns: Columns, source: Source, data_start: int) -> None:
    """Raise unless the tensors cover every byte of the data exactly once."""
    covered = 0
    for position, begin in enumerate(columns.begins):
        if begin != covered:
            raise FormatError(
                "tensors overlap" if begin < covered else "bytes belong to no tensor",
                file=source.path,
                tensor=columns.names[position],
                offset=data_start + min(begin, covered),
                expected=f"its first byte at {covered} of the data",
                found=f"bytes {begin} to {columns.ends[position]}",
            )
        covered = columns.ends[position]
    available = source.identity.nbytes - data_start
    if covered != available:
        short = covered > available
        raise (TruncatedError if short else FormatError)(
            "the file ends before the end of its last tensor" if short else "bytes follow the last tensor",
            file=source.path,
            offset=data_start + min(covered, available),
            expected=f"{covered} bytes of data",
            found=f"{available} bytes",
        )


def _tree(columns: Columns, path: str) -> dict[str, Entry | UnsupportedValue]:
    tree: dict[str, Entry | UnsupportedValue] = {}
    for i, (name, each) in enumerate(zip(columns.names, columns.layouts, strict=True)):
        if each.unsupported:
            tree[name] = UnsupportedValue(qualified_name=each.dtype, reason=each.unsupported, file=path)
        else:
            tree[name] = Entry(elements_of(each.dtype), each.shape, each.stride, i)
    return tree
