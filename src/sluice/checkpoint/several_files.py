"""Open the files of a directory, an index file or a list, in several threads, and merge them.

The first damaged file stops the rest. Missing files do not: they are reported together with every problem that the
headers of the other files show.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from typing import cast

from sluice._defaults import INDEXING_THREADS
from sluice._errors import CheckpointError, LimitError
from sluice._options import TEXT_ENCODING, Limits
from sluice._threads import in_threads
from sluice.checkpoint.merging import incomplete, merge
from sluice.checkpoint.names import METADATA_FILE
from sluice.checkpoint.one_file import open_alone
from sluice.checkpoint.open_file import OpenFile, open_file
from sluice.checkpoint.survey import CheckpointLayout, index_layout, listed_layout, open_member, survey
from sluice.records import Index
from sluice.records.bulk import collector_paused
from sluice.sources.directory import Directory
from sluice.sources.opening import (
    Location,
    check_listed,
    is_remote,
    location_name,
    location_text,
    open_directory,
    open_place,
    open_source,
    parent_directory,
)

__all__ = ["open_files_at", "open_layout", "open_listed"]


def open_files_at(
    path: Location, limits: Limits, encoding: str = TEXT_ENCODING
) -> tuple[Index, tuple[OpenFile, ...]] | None:
    """Open a directory, an index file of shards or the metadata of a distributed checkpoint; see ``opening.open_path``.

    A path that ends in ``.json`` must be an index file; a path to ``.metadata`` means its directory. Returns None for
    any other file.
    """
    name = location_name(path)
    single = is_remote(path) and (name.endswith(".json") or name == METADATA_FILE)  # asks no server for a directory
    directory: Directory | None = None
    if is_remote(path) and not single:
        place = open_place(path)
        if not hasattr(place, "entries"):
            return open_alone(place, limits, encoding)
        directory = cast("Directory", place)
    elif not single:
        directory = open_directory(path)
    if directory is not None:
        return open_layout(survey(directory, limits), limits, encoding)
    if name == METADATA_FILE:
        parent, _ = parent_directory(path)
        layout = CheckpointLayout(
            path=location_text(path), directory=parent, kind="distributed", files=(METADATA_FILE,)
        )
        return open_layout(layout, limits, encoding)
    if not name.endswith(".json"):
        return None
    parent, _ = parent_directory(path)
    with closing(parent.open(name) if is_remote(path) else open_source(path)) as index_file:
        layout = index_layout(index_file, parent, limits)
    return open_layout(layout, limits, encoding)


def open_listed(
    paths: Sequence[Location], limits: Limits, encoding: str = TEXT_ENCODING
) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open two or more files that are one checkpoint together; see ``opening.open_list``."""
    layout = listed_layout(paths, limits)
    check_listed(paths)
    return open_layout(layout, limits, encoding)


def open_layout(
    layout: CheckpointLayout, limits: Limits, encoding: str = TEXT_ENCODING
) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open the files of a layout; returns and raises as ``open_path`` does."""
    if layout.kind == "distributed":
        # Imported here: it brings a package that no other checkpoint needs.
        from sluice.checkpoint.distributed import open_distributed

        return open_distributed(layout, limits)
    opening = _Opening(layout, limits, encoding)
    try:
        try:
            in_threads(opening.open, len(layout.files), threads=INDEXING_THREADS, name="sluice-index")
        except CheckpointError as error:
            if opening.missing:
                raise incomplete(layout, opening.missing, damaged=str(error)) from error
            raise
        with collector_paused():
            return merge(layout, opening.files, limits)
    except BaseException:
        opening.close()
        raise


class _Opening:
    """Opens the files of one layout; ``open`` may be called from any thread.

    Attributes:
        files: The open files, in the order of the layout; None for files that were not opened.
        missing: Positions of the files that do not exist.
    """

    def __init__(self, layout: CheckpointLayout, limits: Limits, encoding: str) -> None:
        self.files: list[OpenFile | None] = [None] * len(layout.files)
        self.missing: list[int] = []
        self._layout = layout
        self._limits = limits
        self._encoding = encoding
        self._storages = 0
        self._counting = threading.Lock()

    def open(self, position: int) -> None:
        source = open_member(self._layout.directory, self._layout.files[position], self._limits)
        if source is None:
            self.missing.append(position)
            return
        self.files[position] = file = open_file(source, self._limits, self._encoding)
        with self._counting:
            self._storages += len(file.index.storages)
        if self._storages > self._limits.entries:
            expected = f"at most {self._limits.entries}"
            raise LimitError("the files together exceed the limit 'entries'", file=self._layout.path, expected=expected)

    def close(self) -> None:
        for file in self.files:
            if file is not None:
                file.source.close()
