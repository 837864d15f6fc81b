"""Open the files of a directory, an index file or a list, in several threads, and merge them.

The first damaged file stops the rest. Missing files do not: they are reported together with every problem that the
headers of the other files show.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from msgspec.structs import replace

from sluice._defaults import INDEXING_THREADS
from sluice._errors import CheckpointError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice._threads import in_threads
from sluice.checkpoint.merging import incomplete, merge
from sluice.checkpoint.open_file import CheckpointLayout, OpenFile, open_file, open_member
from sluice.checkpoint.zero import merge_zero
from sluice.formats.archives.tar import ArchiveMember
from sluice.records import Index, collector_paused

__all__ = ["open_files"]


def open_files(layout: CheckpointLayout, limits: Limits, encoding: str) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open the files of a layout and merge them; see ``opening.open_layout``."""
    if layout.kind == "distributed":
        # Here, not above: few directories are distributed checkpoints.
        from sluice.checkpoint.distributed import open_distributed

        return _in_archives(*open_distributed(layout, limits))
    files: list[OpenFile | None] = [None] * len(layout.files)
    missing: list[int] = []
    storages = 0
    counting = threading.Lock()

    def open_one(position: int) -> None:
        nonlocal storages
        source = open_member(layout.directory, layout.files[position], limits)
        if source is None:
            missing.append(position)
            return
        files[position] = file = open_file(source, limits, encoding)
        with counting:
            storages += len(file.index.storages)
        check_limit(limits, "entries", storages, "the number of tensors in all files", file=layout.path)

    try:
        try:
            in_threads(open_one, len(files), threads=INDEXING_THREADS, name="sluice-index")
        except CheckpointError as error:
            if missing:
                raise incomplete(layout, missing, damaged=str(error)) from error
            raise
        with collector_paused():
            merged = (merge_zero if layout.kind in {"zero", "zero-optimizer"} else merge)(layout, files, limits)
            return _in_archives(*merged)
    except BaseException:
        for file in files:
            if file is not None:
                file.source.close()
        raise


def _in_archives(index: Index, files: Sequence[OpenFile]) -> tuple[Index, tuple[OpenFile, ...]]:
    """Return an index and its files with offsets in the archives that hold them, in place of those in members."""
    if not any(isinstance(file.source, ArchiveMember) for file in files):
        return index, tuple(files)
    opened = tuple(
        replace(file, source=file.source.archive, start=file.source.start, nbytes=file.source.identity.nbytes)
        if isinstance(file.source, ArchiveMember)
        else file
        for file in files
    )
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
