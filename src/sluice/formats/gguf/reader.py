"""The GGUF format, versions 2 and 3: metadata, tensor descriptions, then the data of the tensors, all little-endian.

Layout::

    bytes 0..4      "GGUF"
    bytes 4..8      the version, uint32
    bytes 8..24     the number of tensors and the number of metadata entries, uint64 each
    metadata        each a key (text), a type (uint32) and a value; a text is a length (uint64) and UTF-8
    descriptions    each a name (text), the number of dimensions (uint32), their sizes (uint64), the fastest first, a
                    type (uint32) and the offset of its data (uint64)
    padding         to a multiple of the alignment: the metadata "general.alignment", or 32
    data            offsets count from its first byte, and are multiples of the alignment

Limits: ``Limits.entries`` for tensors and for metadata, ``Limits.header_bytes``, ``Limits.name_bytes``,
``Limits.dimensions``; numbers of tensors, entries and items against the file size, before the first of them is read.

Refused: files in big-endian byte order, and version 1, which had other lengths; duplicate names and keys; arrays of
arrays, as in llama.cpp; rows that are not whole packs; offsets that are not aligned; tensors that overlap or pass the
end of the file. As in ggml, bytes between tensors and after the last one may be anything.

Dtypes: F32, F16, BF16, F64 and integers are those of torch. Packs of the quantized types (``header.TYPES``) are decoded
to float32, those with tables of values by the package gguf. Tensors of other types become ``UnsupportedValue`` leaves.

The tree is a flat dict in data order: names are those of llama.cpp, and shapes are in the order of torch, the reverse
of that in the file.
"""

from __future__ import annotations

from importlib.util import find_spec

from sluice._errors import FormatError, TruncatedError, UnsupportedError
from sluice._options import Limits
from sluice.formats.detection import GGUF_MAGIC, is_gguf
from sluice.formats.gguf.header import Header, TensorDescription
from sluice.formats.protocol import LocatedByIndex
from sluice.records import Entry, FileRecord, Index, Storage, UnsupportedValue, collector_paused
from sluice.records.geometry import contiguous_stride, round_up
from sluice.sources.protocol import Source

__all__ = ["GgufFormat"]

#: Bytes before the metadata: magic, version, and two counts.
_FIXED_BYTES = 24

_VERSIONS = (2, 3)

_REQUANTIZE = (
    "Convert the file with llama.cpp, 'llama-quantize --allow-requantize FILE OUT Q8_0', or get the model in a "
    "different type."
)


class GgufFormat(LocatedByIndex):
    """The format of a GGUF file; see ``Format``."""

    name = "gguf"

    def read_index(self, source: Source, limits: Limits) -> Index:
        with collector_paused():
            version = _version(source)
            header = Header(source, limits, len(GGUF_MAGIC) + 4)
            tensors, entries = header.u64(), header.u64()
            metadata = header.metadata(entries)
            descriptions = header.descriptions(tensors)
            descriptions.sort(key=lambda each: (each.begin, each.nbytes))
            data_start = round_up(header.position, header.alignment)
            _check_data(header, descriptions, data_start, source.identity.nbytes)
            tree, storages = _tensors(descriptions, data_start, source.path)
            return Index(
                format=self.name,
                files=(FileRecord(path=source.path, identity=source.identity),),
                storages=storages,
                tree=tree,
                metadata={"version": str(version), **metadata},
            )


def _version(source: Source) -> int:
    """Return the version of the file, after a check of its first bytes."""
    size = source.identity.nbytes
    if size < _FIXED_BYTES:
        problem = "the file ends inside its header"
        raise TruncatedError(
            problem, file=source.path, expected=f"at least {_FIXED_BYTES} bytes", found=f"{size} bytes"
        )
    head = source.read_at(0, 8)
    if not is_gguf(head):
        raise FormatError("not a GGUF file", file=source.path, offset=0, expected=GGUF_MAGIC, found=head[:4])
    version = int.from_bytes(head[4:], "little")
    if version in _VERSIONS:
        return version
    swapped = int.from_bytes(head[4:], "big")
    raise UnsupportedError(
        "this is a big-endian GGUF file" if 0 < swapped < 1 << 16 else "this version of GGUF is not supported",
        file=source.path,
        offset=4,
        expected="little-endian version 2 or 3",
        found=f"version {min(version, swapped)}",
        advice="Convert it with the tools of llama.cpp (gguf_convert_endian.py), or download a current file.",
    )


def _check_data(header: Header, descriptions: list[TensorDescription], data_start: int, size: int) -> None:
    """Raise unless every tensor lies inside the file, and none overlaps another one."""
    end, before = 0, ""
    for each in descriptions:
        if each.begin < end and each.nbytes:
            found = f"bytes from {each.begin}, inside {before!r}"
            raise header.error(
                FormatError, "tensors overlap", each.where, tensor=each.name, expected=f"from {end}", found=found
            )
        if data_start + each.begin + each.nbytes > size:
            raise header.error(
                TruncatedError,
                "the file ends before the end of the tensor",
                min(size, data_start + each.begin),
                tensor=each.name,
                expected=f"{data_start + each.begin + each.nbytes} bytes",
                found=f"{size} bytes",
            )
        if each.nbytes:
            end, before = each.begin + each.nbytes, each.name


def _tensors(
    descriptions: list[TensorDescription], data_start: int, path: str
) -> tuple[dict[str, Entry | UnsupportedValue], tuple[Storage, ...]]:
    """Return the tree, and the storages of its tensors."""
    tree: dict[str, Entry | UnsupportedValue] = {}
    storages: list[Storage] = []
    lacks_package = any(each.type.package for each in descriptions) and find_spec("gguf") is None
    for each in descriptions:
        name, stored, absent = each.type.name, each.type.stored, each.type.package and lacks_package
        if stored is None or absent:
            reason = f"a tensor of GGUF {name}, which " + (
                "the package gguf decodes, and it is not installed" if absent else "sluice does not decode"
            )
            advice = "pip install 'sluice[gguf]'" if absent else _REQUANTIZE
            tree[each.name] = UnsupportedValue(qualified_name=name, reason=reason, file=path, advice=advice)
            continue
        tree[each.name] = Entry(stored, each.shape, contiguous_stride(each.shape), len(storages))
        storages.append(Storage(0, data_start + each.begin, each.nbytes, each.name))
    return tree, tuple(storages)
