"""Open the files of a checkpoint: one file, an object inside a file, or the files of a directory in several threads.

The first damaged file stops the rest. Missing files do not: they are reported together with every problem that the
headers of the other files show.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing

from msgspec.structs import replace

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError
from sluice._options import INDEXING_THREADS, TEXT_ENCODING, Limits
from sluice._threads import Worker, join_threads, spare_threads, start_threads
from sluice.checkpoint.merging import OpenFile, incomplete, merge
from sluice.checkpoint.one_file import one_file
from sluice.checkpoint.survey import METADATA_FILE, CheckpointLayout, index_layout, listed_layout, open_member, survey
from sluice.formats.detection import detect
from sluice.records import Index
from sluice.records.bulk import collector_paused
from sluice.sources.opening import check_listed, open_directory, open_source, parent_directory
from sluice.sources.protocol import Source
from sluice.sources.read_ahead import ReadAhead
from sluice.sources.section import Section

__all__ = ["open_layout", "open_list", "open_path", "open_section"]


def open_path(path: str, limits: Limits, encoding: str = TEXT_ENCODING) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open a file, a directory or the index file of a sharded checkpoint; reads no tensor data.

    A path that ends in ``.json`` must be an index file; a path to ``.metadata`` means its directory.
    ``encoding`` is that of text which Python 2 wrote.

    Returns:
        The index of the checkpoint, and its files in the order of ``Index.files``.

    Raises:
        IncompleteCheckpointError: Files are missing.
        CheckpointError: A file is damaged, unsafe or of an unknown format, or the files contradict each other.
        ReadError: A file cannot be read.
        UnsupportedError: The path is a URL, or the format is one that sluice does not read.
    """
    directory = open_directory(path)
    if directory is not None:
        return open_layout(survey(directory, limits), limits, encoding)
    parent, name = parent_directory(path)
    if name.endswith(".json"):
        with closing(open_source(path)) as index_file:
            layout = index_layout(index_file, parent, limits)
        return open_layout(layout, limits, encoding)
    if name == METADATA_FILE:
        layout = CheckpointLayout(path=path, directory=parent, kind="distributed", files=(METADATA_FILE,))
        return open_layout(layout, limits, encoding)
    file = _open_file(open_source(path), limits, encoding)
    try:
        return one_file(file.index, limits), (file,)
    except BaseException:
        file.source.close()
        raise


def open_list(
    paths: Sequence[str], limits: Limits, encoding: str = TEXT_ENCODING
) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open files that are one checkpoint together; returns and raises as ``open_path`` does.

    The files hold state dicts without common names. A list of one path is the same as the path.

    Raises:
        MissingFileError: There is nothing at some of the paths.
    """
    if len(paths) == 1:
        return open_path(paths[0], limits, encoding)
    layout = listed_layout(paths, limits)
    check_listed(paths)
    return open_layout(layout, limits, encoding)


def _open_file(source: Source, limits: Limits, encoding: str) -> OpenFile:
    """Index a file; closes the source if that fails."""
    try:
        headers = ReadAhead(source)
        file_format = detect(headers, encoding=encoding)
        index = file_format.read_index(headers, limits)
        if index.end not in {None, source.identity.nbytes}:
            raise FormatError(
                "bytes follow the last storage; to read one of several objects in a file, pass an open file object "
                "positioned at its first byte",
                file=source.path,
                offset=index.end,
                expected=f"{index.end} bytes",
                found=f"{source.identity.nbytes} bytes",
                advice="torch reads the first object and ignores the rest.",
            )
        return OpenFile(source=source, locator=file_format, index=index)
    except BaseException:
        source.close()
        raise


def open_section(
    source: Source, start: int, limits: Limits, encoding: str = TEXT_ENCODING
) -> tuple[Index, tuple[OpenFile, ...], int]:
    """Open the checkpoint that starts at byte ``start`` of a source; closes the source if that fails.

    Returns:
        Its index, its only file, and the offset of the first byte after it: that of the next object in legacy files,
        the end of the source in all other formats.

    Raises:
        CheckpointError: The checkpoint is damaged, unsafe or of an unknown format.
    """
    try:
        left = source.identity.nbytes - start
        if left <= 0:
            problem = "the file ends where a checkpoint should start"
            raise TruncatedError(problem, file=source.path, offset=start, found="nothing")
        section = Section(source, start, left)
        try:
            file_format = detect(section, encoding=encoding)
            own = file_format.read_index(section, limits)
            index = one_file(own, limits)
        except CheckpointError as error:
            if error.offset is not None:
                error.offset += start
            raise
    except BaseException:
        source.close()
        raise
    storages = tuple(replace(storage, offset=storage.offset + start) for storage in index.storages)
    end = start + (left if own.end is None else own.end)
    files = tuple(replace(file, identity=source.identity) for file in index.files)
    index = replace(index, storages=storages, files=files)
    return index, (OpenFile(source=source, locator=file_format, index=own, start=start),), end


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
            _in_threads(opening.open, len(layout.files))
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
        self.files[position] = file = _open_file(source, self._limits, self._encoding)
        with self._counting:
            self._storages += len(file.index.storages)
        if self._storages > self._limits.entries:
            expected = f"at most {self._limits.entries}"
            raise LimitError("the files together exceed the limit 'entries'", file=self._layout.path, expected=expected)

    def close(self) -> None:
        for file in self.files:
            if file is not None:
                file.source.close()


def _in_threads(work: Callable[[int], None], count: int) -> None:
    """Call ``work`` with each number below ``count``, in this thread and in several others.

    The first failure stops all threads, which are joined before it is raised. Of several failures the one with the
    lowest number is raised. If the process cannot start more threads, fewer do the work.
    """
    waiting = deque(range(count))
    failures: dict[int, BaseException] = {}

    def run() -> None:
        while waiting:
            try:
                number = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                work(number)
            except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
                failures[number] = error
                waiting.clear()

    threads: list[Worker] = []
    try:
        start_threads(threads, spare_threads(min(INDEXING_THREADS, count) - 1), run, "sluice-index")
        run()
    finally:
        waiting.clear()
        join_threads(threads)
    if failures:
        raise failures[min(failures)]
