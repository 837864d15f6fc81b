"""The layout of a checkpoint, which ``opening.classify`` returns, and one open file: its source, format and index."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import CheckpointError, FormatError, MissingFileError, TruncatedError
from sluice._options import Limits
from sluice.formats.detection import Head, detect
from sluice.formats.protocol import Checksum, Locator
from sluice.records import Index
from sluice.sources.directory import Directory, LocalDirectory
from sluice.sources.opening import Place
from sluice.sources.protocol import Source, checks_with_data
from sluice.sources.wrappers import ReadAhead, Section

if TYPE_CHECKING:
    from sluice.formats.shard_index import ShardIndex

__all__ = ["METADATA_FILE", "PARAMETER_SUFFIX", "PLACES", "CheckpointLayout", "OpenFile", "open_file", "open_member"]

#: File that describes a torch.distributed.checkpoint directory.
METADATA_FILE = ".metadata"

#: Suffix of the files of a directory with one file for each parameter.
PARAMETER_SUFFIX = ".pt"

#: Key of the metadata of a shard that torch's ``HuggingFaceStorageWriter`` wrote: the places of its chunks in their
#: tensors.
PLACES = "DCP_SHARDING_INFO"


class CheckpointLayout(Struct, frozen=True, kw_only=True):
    """The files that make up a checkpoint, before any of them is indexed."""

    #: Path of the file, directory or index file, or its address without credentials; for messages.
    path: str
    #: Its location.
    place: Place = Place(kind="local", title="")
    #: ``file``: one open file; ``whole``: one model file of a directory; ``shards``: parts with an index; ``parts``:
    #: state dicts without repetition; ``parameters``: one tensor each; ``distributed``: the files that the metadata
    #: file names; ``ranks``: one of each rank, with prefixes; ``zero``: the weights of DeepSpeed's ZeRO;
    #: ``zero-optimizer``: its optimizer.
    kind: Literal["file", "whole", "shards", "parts", "parameters", "distributed", "ranks", "zero", "zero-optimizer"]
    #: The open file, for ``file``.
    source: Source | None = None
    #: Its first bytes, if the checkpoint begins there.
    head: Head | None = None
    #: First byte of the checkpoint in ``source``, if other objects may follow it; None if it is the whole file.
    start: int | None = None
    #: The directory that holds ``files``; without meaning for ``file``.
    directory: Directory = LocalDirectory("")
    #: Relative names of the files, with forward slashes. They need not exist; ``distributed`` has that of its metadata.
    files: tuple[str, ...] = ()
    #: The index, for ``shards``.
    shard_index: ShardIndex | None = None
    #: Notes for the report, each a sentence.
    notes: tuple[str, ...] = ()


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
            return dict(self.locator.locate(self.source, self.index, storages))
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


def open_member(directory: Directory, name: str, limits: Limits) -> Source | None:
    """Return a file of a checkpoint directory as a source, or None if it does not exist.

    Raises:
        PathEscapeError: It leads out of the directory through a symbolic link, and the limits do not allow that.
        CheckpointError: It is empty or not a regular file.
        ReadError: It cannot be examined.
    """
    if not limits.symlinks_outside:
        directory.check_inside(name)
    try:
        return directory.open(name)
    except CheckpointError as error:
        if isinstance(error, MissingFileError) or isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


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
    start = None if layout is None else layout.start
    try:
        head = (layout and layout.head) or Head.of(_after(source, start) if start else ReadAhead(source))
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
