"""One open file of a checkpoint: its source, its format and its own index."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import CheckpointError, FormatError, TruncatedError
from sluice._options import Limits
from sluice.checkpoint.layout import CheckpointLayout
from sluice.formats.detection import Head, detect
from sluice.formats.protocol import Checksum, Locator
from sluice.records import Index
from sluice.sources.protocol import Source, checks_with_data
from sluice.sources.wrappers import ReadAhead, Section

__all__ = ["OpenFile", "open_file"]


#: The layout of a file of which nothing was looked at.
_ONE_OF_SEVERAL = CheckpointLayout(path="", kind="file")


class OpenFile(Struct, frozen=True, kw_only=True):
    """One file of an open checkpoint."""

    #: The source of its bytes.
    source: Source
    #: Locates the data of its storages.
    locator: Locator
    #: Its own index; without a tree if it is one of several files, as the merged index has the tree.
    index: Index
    #: Position of its first storage in the index of the checkpoint.
    first_storage: int = 0
    #: First byte of the checkpoint in the source: the offsets of ``index`` count from there.
    start: int = 0
    #: Its bytes from there on; None for all that follow. A member of an archive is not the only checkpoint in it.
    nbytes: int | None = None

    def locate(self, storages: Iterable[int], *, at_once: bool = False) -> dict[int, int]:
        """Return the data offset of each of ``storages`` that is not located in its index.

        Args:
            storages: Positions in the index of the checkpoint.
            at_once: Whether to check headers now, also where requests are expensive.
        """
        if at_once and checks_with_data(self.source):
            whole = Section(self.source, 0, self.source.identity.nbytes)  # which does not check with the data
            return replace(self, source=whole).locate(storages)
        if not (self.first_storage or self.start):  # most files; equal numbers would be new objects
            return dict(self.locator.locate(self._section(), self.index, storages))
        found = self.locator.locate(self._section(), self.index, [number - self.first_storage for number in storages])
        return {number + self.first_storage: offset + self.start for number, offset in found.items()}

    def checksums(self, limits: Limits) -> list[Checksum | CheckpointError]:
        """Return the checksums that the file records, with offsets in ``source``; see ``Locator``."""
        found = self.locator.checksums(self._section(), limits)
        for one in found if self.start else ():
            if isinstance(one, CheckpointError) and one.offset is not None:
                one.offset += self.start
        return [replace(one, offset=one.offset + self.start) if isinstance(one, Checksum) else one for one in found]

    @property
    def end(self) -> int:
        """First byte after the checkpoint in the source: that of the next object in legacy files."""
        last = self.source.identity.nbytes if self.nbytes is None else self.start + self.nbytes
        return last if self.index.end is None else self.start + self.index.end

    def _section(self) -> Source:
        left = self.source.identity.nbytes - self.start if self.nbytes is None else self.nbytes
        return Section(self.source, self.start, left) if self.start else self.source


def open_file(source: Source, limits: Limits, encoding: str, layout: CheckpointLayout | None = None) -> OpenFile:
    """Index a file; closes the source if that fails.

    Args:
        source: The file.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote.
        layout: Its layout, if it is a whole checkpoint; it may begin in the middle.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown format.
        ReadError: It cannot be read.
    """
    layout = layout or _ONE_OF_SEVERAL
    start = layout.start
    try:
        head = layout.head or Head.of(_after(source, start) if start else ReadAhead(source))
        try:
            file_format = detect(head, encoding=encoding)
            index = file_format.read_index(head.source, limits)
        except CheckpointError as error:
            if error.offset is not None:
                error.offset += start or 0
            raise
        if start is None and index.end not in {None, source.identity.nbytes}:
            raise FormatError(
                "bytes follow the last storage; to read one of several objects in a file, pass an open file object "
                "positioned at its first byte",
                file=source.path,
                offset=index.end,
                expected=f"{index.end} bytes",
                found=f"{source.identity.nbytes} bytes",
                advice="torch reads the first object and ignores the rest.",
            )
        return OpenFile(source=source, locator=file_format, index=index, start=start or 0)
    except BaseException:
        source.close()
        raise


def _after(source: Source, start: int) -> Section:
    left = source.identity.nbytes - start
    if left <= 0:
        problem = "the file ends where a checkpoint should start"
        raise TruncatedError(problem, file=source.path, offset=start, found="nothing")
    return Section(source, start, left)
