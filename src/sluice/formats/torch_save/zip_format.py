"""The format of ``torch.save`` since torch 1.6: a zip archive of uncompressed records under one directory.

Records::

    NAME/data.pkl             the pickled object; its storages are persistent ids
    NAME/data/KEY             the data of storage KEY
    NAME/version              format version, 1 to 10
    NAME/byteorder            "little" or "big"; absent in old files: little, or as torch's
                              ``set_default_load_endianness`` says
    NAME/.storage_alignment, NAME/.format_version, NAME/.data/serialization_id   not used

Indexing reads the central directory, the small records and data.pkl. The offset of the data of a storage depends on the
local header next to the data, so ``locate`` reads the headers of the storages that are needed; where requests are
expensive, it computes the offsets, and the headers are checked when the data is read. ``read_index`` checks the headers
of storages that are followed by a record outside the index, in the same way.

Limits: those of the central directory (``archives.zip_directory``) and of the inert unpickler (``pickles.unpickler``);
``Limits.header_bytes`` for data.pkl.

TorchScript archives and exported programs are of this format too; ``programs`` has their state dicts.

Refused: a storage whose record is missing or does not have the size that the pickle declares; a
pickle followed by more bytes; a pickled object of an arbitrary class instead of plain data.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from sluice._dtypes import number_bytes
from sluice._errors import TORCH_MAY_READ, CheckpointError, FormatError, UnsupportedError
from sluice._options import TEXT_ENCODING, Limits
from sluice.formats.archives.zip_directory import CentralDirectory, first_names, read_directory
from sluice.formats.archives.zip_records import ZipRecord, expect_records, locate_records, read_record, record_checksums
from sluice.formats.foreign import recognise_archive
from sluice.formats.pickles.unpickler import Unpickler
from sluice.formats.protocol import Checksum
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.formats.torch_save.programs import ScriptAllowlist, declared_tensors, read_exported
from sluice.formats.torch_save.storages import StorageReference
from sluice.formats.torch_save.tree_limits import check_object
from sluice.records import Entry, FileRecord, Index, Storage
from sluice.sources.protocol import Source, checks_with_data

__all__ = ["TorchZipFormat"]

#: Format versions that torch reads.
_VERSIONS = range(1, 11)

#: Records that do not affect the tensors. torch reads them, too, and refuses a file in which they are damaged.
_UNUSED_RECORDS = (".storage_alignment", ".format_version", ".data/serialization_id")

#: Maximum size of a record with one word or number, in bytes.
_SMALL_RECORD_BYTES = 64

#: Maximum size of a cached pickle, in bytes. The pickle of a tensor takes about 200.
_MAX_CACHED_BYTES = 1024

#: Names of the formats of programs.
_SCRIPTED, _EXPORTED = "torch-script", "torch-export"

#: The checked object of a file, its storages in the order of first use, and notes for reports.
_ParsedObject: TypeAlias = tuple[object, Sequence[StorageReference], tuple[str, ...]]

#: Immutable types, which files can share.
_IMMUTABLE = frozenset({Entry, bool, int, float, str, type(None)})


class TorchZipFormat(Struct, frozen=True, kw_only=True):
    """The zip format of ``torch.save``; see ``Format``."""

    name = "torch-zip"

    #: Encoding of text that Python 2 wrote; see ``Unpickler``.
    encoding: str = TEXT_ENCODING
    #: Maximum number of cached objects. The pickle of a single tensor or plain value is run once for all files with the
    #: same pickle.
    max_cached: int = 0
    #: Whether to accept a file that holds an object of an arbitrary class, as an inert leaf.
    whole_objects: bool = False
    #: The cached objects, by their pickles and whether the data is big-endian.
    cache: dict[tuple[bytes, bool], _ParsedObject] = {}

    def read_index(self, source: Source, limits: Limits) -> Index:
        try:
            directory = read_directory(source, limits)
            metadata = _read_metadata(source, directory)
        except (FormatError, UnsupportedError) as error:
            raise recognise_archive(first_names(source, limits), source.path) or error from None
        big_endian = metadata["byteorder"] == "big"
        kind = _kind(directory)
        read = read_exported if kind == _EXPORTED else self._unpickle
        tree, references, notes = read(source, directory, limits, big_endian=big_endian)
        positions = _positions(references, directory, source.path)
        last = _records_before_unused_ones(references, positions, directory)
        if not checks_with_data(source):
            locate_records(source, last)
        swapped = (number_bytes(reference.element_dtype) if big_endian else 0 for reference in references)
        storages = (
            Storage(0, directory.headers[at], directory.sizes[at], reference.key, False, item if item > 1 else 0)
            for at, reference, item in zip(positions, references, swapped, strict=True)
        )
        return Index(
            format=kind,
            files=(FileRecord(path=source.path, identity=source.identity),),
            storages=tuple(storages),
            tree=tree,
            crcs=array("I", map(directory.crcs.__getitem__, positions)),
            metadata=metadata,
            notes=notes,
            record_ends={record.header: record.limit for record in last},
        )

    def locate(self, source: Source, index: Index, storages: Iterable[int]) -> Mapping[int, int]:
        unlocated = [position for position in storages if not index.storages[position].located]
        if not unlocated:
            return {}
        # The end of each record by its local header.
        headers = sorted(storage.offset for storage in index.storages)
        limits = {**dict(zip(headers, [*headers[1:], source.identity.nbytes], strict=True)), **index.record_ends}
        archive = index.metadata["archive"]
        records = [
            ZipRecord(
                name=f"{archive}/data/{storage.key}",
                header=storage.offset,
                nbytes=storage.nbytes,
                limit=limits[storage.offset],
                crc=index.crcs[position],
            )
            for position, storage in zip(unlocated, map(index.storages.__getitem__, unlocated), strict=True)
        ]
        found = expect_records(source, records) if checks_with_data(source) else None
        return dict(zip(unlocated, found or locate_records(source, records), strict=True))

    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
        return record_checksums(source, read_directory(source, limits).records(), limits)

    def _unpickle(
        self, source: Source, directory: CentralDirectory, limits: Limits, *, big_endian: bool
    ) -> _ParsedObject:
        record = directory.record("data.pkl")
        assert record is not None  # checked by _read_metadata
        offset, data = read_record(source, record, limits.header_bytes)
        cached = self.cache.get((data, big_endian)) if self.max_cached else None
        if cached is not None:
            return cached
        of_kind = ScriptAllowlist if _kind(directory) == _SCRIPTED else TorchAllowlist
        allowlist = of_kind(limits, len(data), big_endian=big_endian)
        unpickler = Unpickler(data, allowlist, limits=limits, file=source.path, offset=offset, encoding=self.encoding)
        tree = unpickler.load()
        if unpickler.end != len(data):
            raise FormatError("bytes follow the pickle in data.pkl", file=source.path, offset=offset + unpickler.end)
        tree, notes = check_object(tree, unpickler, limits, source.path, whole_objects=self.whole_objects)
        if isinstance(allowlist, ScriptAllowlist):
            tree, more = allowlist.state_dict(tree, declared_tensors(source, directory, limits), source.path)
            notes = (*notes, *more)
            if not tree and any(name.startswith("constants/") for name in directory.positions):
                problem = "this is a frozen TorchScript program: its weights are constants of its code"
                raise UnsupportedError(problem, file=source.path, advice="Save it before torch.jit.freeze.")
        parsed = tree, allowlist.storages, notes
        if type(tree) in _IMMUTABLE and len(self.cache) < self.max_cached and len(data) <= _MAX_CACHED_BYTES:
            self.cache[data, big_endian] = parsed
        return parsed


def _kind(directory: CentralDirectory) -> str:
    """Return the name of the format of an archive."""
    if "archive_format" in directory:
        return _EXPORTED
    return _SCRIPTED if "constants.pkl" in directory else TorchZipFormat.name


def _read_metadata(source: Source, directory: CentralDirectory) -> dict[str, str]:
    if "data.pkl" not in directory and _kind(directory) != _EXPORTED:
        problem = "this zip archive was not written by torch.save: it has no data.pkl"
        raise FormatError(problem, file=source.path, advice=CheckpointError.advice)
    if directory.unsupported is not None:
        raise directory.unsupported
    words = {name: _word(source, directory, name) for name in _UNUSED_RECORDS if name in directory}
    alignment = words.get(".storage_alignment", "64")
    if not alignment.isascii() or not alignment.isdigit():
        raise FormatError("the alignment of storages is not a number", file=source.path, found=repr(alignment))
    version = _version(source, directory)
    byte_order = _word(source, directory, "byteorder") if "byteorder" in directory else _default_byte_order()
    if byte_order not in {"little", "big"}:
        problem, expected = "unknown byte order", "little or big"
        raise UnsupportedError(problem, file=source.path, expected=expected, found=repr(byte_order))
    return {"version": version, "byteorder": byte_order, "archive": directory.archive}


def _default_byte_order() -> str:
    """Return the byte order that torch assumes for a file that does not state its own; little unless it was set."""
    torch = sys.modules.get("torch.serialization")  # the default, if torch is not imported
    chosen = torch.get_default_load_endianness() if torch is not None else None
    order = str(getattr(chosen, "name", "little")).lower()
    return sys.byteorder if order == "native" else order


def _version(source: Source, directory: CentralDirectory) -> str:
    name = ".data/version" if ".data/version" in directory else "version"
    version = _word(source, directory, name).removesuffix("\n")
    if not version.isascii() or not version.isdigit():
        raise FormatError("the format version is not a number", file=source.path, found=repr(version))
    if int(version) not in _VERSIONS:
        problem = "unknown format version, perhaps of a newer torch"
        raise UnsupportedError(problem, file=source.path, expected="1 to 10", found=version, advice=TORCH_MAY_READ)
    return version


def _word(source: Source, directory: CentralDirectory, name: str) -> str:
    record = directory.record(name)
    return "" if record is None else read_record(source, record, _SMALL_RECORD_BYTES)[1].decode("latin1")


def _positions(references: Sequence[StorageReference], directory: CentralDirectory, file: str) -> list[int]:
    """Return the position of each storage's record in the directory."""
    positions = []
    for reference in references:
        position = directory.positions.get(f"data/{reference.key}")
        if position is None:
            if f"tensors/{reference.key}" in directory:
                problem = "an experimental zip file of torch 1.3 to 1.5, which later versions of torch do not read"
                raise UnsupportedError(problem, file=file, found="storages under tensors/")
            raise FormatError(f"the archive has no record for storage {reference.key!r}", file=file)
        if directory.sizes[position] != reference.nbytes:
            raise FormatError(
                f"the size of the record of storage {reference.key!r} does not match the pickle",
                file=file,
                offset=directory.headers[position],
                expected=f"{reference.nbytes} bytes",
                found=f"{directory.sizes[position]} bytes",
            )
        positions.append(position)
    return positions


def _records_before_unused_ones(
    references: Sequence[StorageReference], positions: list[int], directory: CentralDirectory
) -> list[ZipRecord]:
    """Return the records of storages followed by a record outside the index, whose ends the index does not show."""
    used = set(positions)
    records: list[ZipRecord] = []
    for reference, position in zip(references, positions, strict=True):
        if position + 1 not in used and (record := directory.record(f"data/{reference.key}")):
            records.append(record)
    return records
