"""Opening the files of a checkpoint: one, an object inside of one, or those of a directory in a few threads.

The first file that is damaged stops the rest. Missing files do not: they are reported together with all that the
headers of the others say.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError
from sluice._options import INDEXING_THREADS, Limits
from sluice._threads import Worker, join_threads, spare_threads, start_threads
from sluice.checkpoint.distributed import open_distributed
from sluice.checkpoint.merging import OpenFile, incomplete, merge
from sluice.checkpoint.survey import METADATA_FILE, Layout, check_inside, index_layout, survey
from sluice.formats.detection import detect
from sluice.records import Index
from sluice.records.bulk import collector_paused
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source
from sluice.sources.read_ahead import ReadAhead
from sluice.sources.section import Section

__all__ = ["open_path", "open_section"]


def open_path(path: str, limits: Limits) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open a file, a directory or the index file of a sharded checkpoint; reads no tensor data.

    A path that ends in ``.json`` can only be an index file, one to ``.metadata`` stands for its directory.

    Returns:
        The index of the checkpoint, and its files in the order of ``Index.files``.

    Raises:
        IncompleteCheckpointError: Files are missing.
        CheckpointError: A file is damaged, unsafe or of an unknown kind, or the files contradict each other.
        ReadError: Something cannot be read.
    """
    if os.path.isdir(path):
        return _open_layout(survey(path, limits), limits)
    if path.endswith(".json"):
        return _open_layout(index_layout(path, limits), limits)
    directory, name = os.path.split(path)
    if name == METADATA_FILE:
        layout = Layout(path=path, directory=directory, kind="distributed", files=(METADATA_FILE,))
        return _open_layout(layout, limits)
    file = _open_file(path, limits)
    return file.index, (file,)


def _open_file(path: str, limits: Limits) -> OpenFile:
    source = LocalFile(path)
    try:
        headers = ReadAhead(source)
        file_format = detect(headers)
        index = file_format.read_index(headers, limits)
        if index.end not in {None, source.identity.nbytes}:
            raise FormatError(
                "bytes follow the last storage; of several objects in one file, each is read from an open file object "
                "that is positioned where it starts",
                file=path,
                offset=index.end,
                expected=f"{index.end} bytes",
                found=f"{source.identity.nbytes} bytes",
            )
        return OpenFile(source=source, locator=file_format, index=index)
    except BaseException:
        source.close()
        raise


def open_section(source: Source, start: int, limits: Limits) -> tuple[Index, tuple[OpenFile, ...], int]:
    """Open the checkpoint that starts at byte ``start`` of a source; closes the source when that fails.

    Returns:
        Its index, its only file, and the first byte behind it: that of the next object in legacy files, the end of the
        source for all others.

    Raises:
        CheckpointError: What starts there is damaged, unsafe or of an unknown kind.
    """
    try:
        left = source.identity.nbytes - start
        if left <= 0:
            problem = "the file ends where a checkpoint should start"
            raise TruncatedError(problem, file=source.path, offset=start, found="nothing")
        section = Section(source, start, left)
        try:
            file_format = detect(section)
            own = file_format.read_index(section, limits)
        except CheckpointError as error:
            if error.offset is not None:
                error.offset += start
            raise
    except BaseException:
        source.close()
        raise
    storages = tuple(replace(storage, offset=storage.offset + start) for storage in own.storages)
    end = start + (left if own.end is None else own.end)
    index = replace(own, storages=storages, files=tuple(replace(f, identity=source.identity) for f in own.files))
    return index, (OpenFile(source=source, locator=file_format, index=own, start=start),), end


def _open_layout(layout: Layout, limits: Limits) -> tuple[Index, tuple[OpenFile, ...]]:
    if layout.kind == "distributed":
        return open_distributed(layout, limits)
    opening = _Opening(layout, limits)
    try:
        try:
            _in_threads(opening.open, len(layout.files))
        except CheckpointError as error:
            if opening.missing:
                raise incomplete(layout, opening.missing, damaged=str(error)) from error
            raise
        with collector_paused():
            return merge(layout, opening.files)
    except BaseException:
        opening.close()
        raise


class _Opening:
    """Opens the files of one layout; ``open`` may be called from any thread.

    Attributes:
        files: What was opened, at the position of each file.
        missing: Positions of the files that are not there.
    """

    def __init__(self, layout: Layout, limits: Limits) -> None:
        self.files: list[OpenFile | None] = [None] * len(layout.files)
        self.missing: list[int] = []
        self._layout = layout
        self._limits = limits
        self._storages = 0
        self._counting = threading.Lock()

    def open(self, position: int) -> None:
        directory, name = self._layout.directory, self._layout.files[position]
        check_inside(directory, name, self._limits)
        try:
            file = _open_file(os.path.join(directory, name), self._limits)
        except CheckpointError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            self.missing.append(position)
            return
        self.files[position] = file
        with self._counting:
            self._storages += len(file.index.storages)
        if self._storages > self._limits.entries:
            expected = f"at most {self._limits.entries}"
            raise LimitError("the files together pass the limit 'entries'", file=self._layout.path, expected=expected)

    def close(self) -> None:
        for file in self.files:
            if file is not None:
                file.source.close()


def _in_threads(work: Callable[[int], None], count: int) -> None:
    """Call ``work`` with each number below ``count``, here and in a few threads.

    The first failure stops all of them, which are joined before it is raised; of several the lowest number's is. Where
    the process may not start more threads, fewer do the same.
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
