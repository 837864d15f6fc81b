"""Files of a checkpoint that are members of an archive: located in the archive itself, so that reads are aligned."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sluice.checkpoint.open_file import OpenFile
from sluice.formats.archives.tar import ArchiveMember
from sluice.records import Index

__all__ = ["in_archives"]


def in_archives(index: Index, files: Sequence[OpenFile]) -> tuple[Index, tuple[OpenFile, ...]]:
    """Return an index and its files with offsets in the archives that hold them, in place of those in members."""
    if not any(isinstance(file.source, ArchiveMember) for file in files):
        return index, tuple(files)
    opened = tuple(map(_in_archive, files))
    storages = (
        replace(storage, offset=storage.offset + opened[storage.file].start) if opened[storage.file].start else storage
        for storage in index.storages
    )
    records = (
        replace(record, path=file.source.path, identity=file.source.identity)
        for record, file in zip(index.files, opened, strict=True)
    )
    name = f"tar-{index.format}"
    return replace(index, format=name, storages=tuple(storages), files=tuple(records)), opened


def _in_archive(file: OpenFile) -> OpenFile:
    member = file.source
    if not isinstance(member, ArchiveMember):
        return file
    return replace(file, source=member.archive, start=member.start, nbytes=member.identity.nbytes)
