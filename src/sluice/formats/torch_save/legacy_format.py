"""What ``torch.save`` wrote before torch 1.6, and writes with ``_use_new_zipfile_serialization=False``.

Layout::

    pickle    0x1950a86a20f9469cfc6c, the magic number
    pickle    1001, the version of the protocol
    pickle    {"protocol_version": 1001, "little_endian": True, "type_sizes": {...}}
    pickle    the object; its storages are persistent ids (``_legacy_objects``)
    pickle    [KEY, KEY, ...]: the keys of the storages, in the order of their data
    storages  for each key the number of its elements, as a signed integer of 8 bytes, and the elements, little-endian
              whatever the machine: only of complex numbers do big-endian machines write the halves in reverse order

Several objects may follow each other in one file: ``Index.end`` says where the first one ends. No offset is written
anywhere: where a storage lies follows from the sizes that the object declares for those before
it. Indexing reads the pickles (``_pickle_stream``) and then the number before each storage, which must be the declared
one. Numbers closer than 16 KiB are read together with the data between them. Data starts wherever the pickles end, as a
rule at no multiple of its element size.

Limits: those of a pickle (``_pickle``), ``Limits.header_bytes`` for each, and ``Limits.entries`` for the storages.

Refused, where torch does not look: an object that declares a storage which the list of keys does not name, or the
reverse; a key named twice; system information without byte order; a file that is also a tar archive, as 0.1 wrote them,
with the magic number for the name of its first member.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import add
from typing import Never

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError, UnsafeContentError
from sluice._options import Limits
from sluice.formats.archives.tar import is_tar
from sluice.formats.coalesced import read_ranges
from sluice.formats.pickles.stream import unpickle_at
from sluice.formats.pickles.unpickler import KeyGuard
from sluice.formats.protocol import Checksum
from sluice.formats.torch_save.allowlist import StorageReference
from sluice.formats.torch_save.legacy_allowlist import LegacyAllowlist
from sluice.formats.torch_save.pickled_object import check_object
from sluice.records import FileRecord, Index, Storage
from sluice.records.bulk import collector_paused, records_from_columns
from sluice.sources.protocol import Source

__all__ = ["TorchLegacyFormat"]

_MAGIC, _PROTOCOL_VERSION = 0x1950A86A20F9469CFC6C, 1001

#: How a pickle of an integer of 10 bytes starts, in protocols 2 and 3, and in 4 and 5, which have a frame of 13 bytes.
_STARTS = tuple(
    bytes([0x80, protocol]) + frame + b"\x8a\x0a"
    for protocol, frame in [(2, b""), (3, b""), (4, b"\x95\x0d" + bytes(7)), (5, b"\x95\x0d" + bytes(7))]
)

#: Before the data of each storage: the number of its elements.
_COUNT = struct.Struct("<q")

#: Reading more of the data between two counts takes longer than another read, by one of eight threads.
_COUNT_GAP_BYTES = 16 << 10


class TorchLegacyFormat:
    """One legacy file of ``torch.save``; see ``Format``."""

    name = "torch-legacy"

    def matches(self, head: bytes) -> bool:
        claimed = any(head.startswith(start) or start.startswith(head) for start in _STARTS)
        return claimed and not is_tar(head)

    def read_index(self, source: Source, limits: Limits) -> Index:
        with collector_paused():
            start, little_endian = _check_preamble(source, limits)
            pickle_bytes = min(source.identity.nbytes, limits.header_bytes)
            objects = LegacyAllowlist(limits, pickle_bytes, little_endian=little_endian)
            tree, unpickler, end = unpickle_at(source, start, objects, limits)
            tree, notes = check_object(tree, unpickler, objects, limits, source.path)
            order, data_start = _read_order(source, end, objects.storages, limits)
            offsets, end = _check_counts(source, order, data_start)
            return Index(
                format=self.name,
                files=(FileRecord(path=source.path, identity=source.identity),),
                storages=_storages(objects.storages, order, offsets),
                tree=tree,
                metadata={"protocol_version": str(_PROTOCOL_VERSION), "byteorder": "little"},
                notes=notes,
                end=end,
            )

    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:  # noqa: ARG002
        return []  # the format has none

    def locate(
        self,
        source: Source,  # noqa: ARG002 - the protocol's; the index locates every storage of this format
        index: Index,  # noqa: ARG002 - the same
        storages: Iterable[int],  # noqa: ARG002 - the same
    ) -> Mapping[int, int]:
        return {}


class _Nothing:
    """What the pickles around the object may name: nothing."""

    def __init__(self, limits: Limits) -> None:
        self.names: Mapping[tuple[str, str], object] = {}
        self.keys = KeyGuard(limits)

    def load_persistent(self, identity: object) -> Never:  # noqa: ARG002 - whatever it is
        raise FormatError("a storage outside the object of the file")


def _read_plain(source: Source, start: int, limits: Limits) -> tuple[object, int]:
    """Return the plain value of the pickle at ``start``, and where it ends."""
    value, unpickler, end = unpickle_at(source, start, _Nothing(limits), limits)
    if unpickler.refusal is not None:
        raise unpickler.refusal.error
    for leaf in unpickler.opaque.values():
        raise UnsafeContentError(f"the file names {leaf.qualified_name} outside its object", file=source.path)
    return value, end


def _check_preamble(source: Source, limits: Limits) -> tuple[int, bool]:
    """Check the three pickles before the object; return where it starts and whether the machine was little-endian."""
    magic, end = _read_plain(source, 0, limits)
    if type(magic) is not int or magic != _MAGIC:
        raise FormatError("the magic number is wrong", file=source.path, offset=0, expected=f"{_MAGIC:#x}")
    start = end
    version, end = _read_plain(source, start, limits)
    if type(version) is not int or version != _PROTOCOL_VERSION:
        raise FormatError("unknown version of the protocol", file=source.path, offset=start, expected=_PROTOCOL_VERSION)
    start = end
    system, end = _read_plain(source, start, limits)
    little_endian = system.get("little_endian") if type(system) is dict else None
    if type(little_endian) is not bool:
        raise FormatError("the file does not say its byte order", file=source.path, offset=start)
    return end, little_endian


def _read_order(
    source: Source, start: int, storages: Sequence[StorageReference], limits: Limits
) -> tuple[list[StorageReference], int]:
    """Return the storages in the order of their data, and where that starts."""
    if len(storages) > limits.entries:
        raise LimitError(f"the checkpoint has more than {limits.entries} storages", file=source.path)
    keys, end = _read_plain(source, start, limits)
    if type(keys) is not list or any(type(key) is not str for key in keys):
        raise FormatError("the list of storage keys is no list of text", file=source.path, offset=start)
    unlisted = {storage.key: storage for storage in storages}
    order = []
    for key in keys:
        storage = unlisted.pop(key, None)
        if storage is None:
            problem = f"the list of storage keys names {key!r} twice, or no tensor does"
            raise FormatError(problem, file=source.path, offset=start)
        order.append(storage)
    for key in unlisted:
        raise FormatError(f"the list of storage keys does not name {key!r}", file=source.path, offset=start)
    return order, end


def _check_counts(source: Source, order: Sequence[StorageReference], data_start: int) -> tuple[list[int], int]:
    """Return where the data of each storage starts and where the last ends; check the counts before them.

    The counts come first: a wrong one names its storage, while the end only says that something is wrong.
    """
    file_bytes = source.identity.nbytes
    *starts, end = accumulate((_COUNT.size + storage.nbytes for storage in order), initial=data_start)
    inside = bisect_right(starts, file_bytes - _COUNT.size)
    counts = read_ranges(source, starts[:inside], [_COUNT.size] * inside, gap_bytes=_COUNT_GAP_BYTES)
    for storage, start, raw in zip(order, starts, counts, strict=False):  # as many as lie inside the file
        (count,) = _COUNT.unpack(raw)
        if count != storage.numel:
            raise FormatError(
                f"storage {storage.key!r} has another size than the object declares",
                file=source.path,
                offset=start,
                expected=f"{storage.numel} elements of {storage.dtype}",
                found=count,
            )
    if end > file_bytes:
        raise TruncatedError(
            "the file ends before its last storage",
            file=source.path,
            offset=file_bytes,
            expected=f"{end} bytes",
            found=f"{file_bytes} bytes",
        )
    return list(map(add, starts, repeat(_COUNT.size))), end


def _storages(
    storages: Sequence[StorageReference], order: Sequence[StorageReference], offsets: Sequence[int]
) -> tuple[Storage, ...]:
    """Return the storages as entries refer to them: by position, not by place."""
    by_position = [0] * len(storages)
    for reference, offset in zip(order, offsets, strict=True):
        by_position[reference.position] = offset
    made = records_from_columns(
        Storage,
        len(storages),
        file=repeat(0),
        offset=by_position,
        nbytes=(reference.nbytes for reference in storages),
        key=(reference.key for reference in storages),
    )
    return tuple(made)
