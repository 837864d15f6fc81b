"""An open checkpoint: its index, the sources of its files, and the places of their data. No torch.

``sluice.Checkpoint`` is this plus tensors that read themselves; everything below the API takes an ``OpenCheckpoint``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol, Self, TypeAlias, runtime_checkable

from msgspec.structs import replace

from sluice._dtypes import is_castable
from sluice._errors import CheckpointError, MismatchError, PartialLoadError, SluiceError
from sluice._messages import type_of
from sluice._options import BYTES_ENCODING, DEFAULT_LIMITS, TEXT_ENCODING, Limits
from sluice.checkpoint.open_file import CheckpointLayout, OpenFile
from sluice.checkpoint.opening import classify, open_layout
from sluice.entries import tree as trees
from sluice.entries.lookup import subtree
from sluice.formats.protocol import Checksum
from sluice.records import Entry, Index, Opaque
from sluice.sources.opening import PathOrAddress, Place, SourceLocation
from sluice.sources.protocol import Source

__all__ = ["CheckpointSource", "OpenCheckpoint", "OpensItself", "borrow", "check_encoding"]


class OpenCheckpoint:
    """The index of a checkpoint and its open files. A context manager that closes them."""

    def __init__(
        self,
        path: str,
        index: Index,
        files: tuple[OpenFile, ...],
        limits: Limits,
        place: Place | None = None,
        lender: OpenCheckpoint | None = None,
    ) -> None:
        #: Path of the file or directory that was opened, or its address without credentials; of a list of files, the
        #: first, and the number of the others.
        self.path = path
        #: Where it was opened.
        self.place = place
        #: The records of every tensor, which do not need torch.
        self.index = index
        #: The open files, in the order of ``index.files``.
        self.open_files = files
        #: Host memory in which files of it are computed when they are read, in bytes.
        self.working_bytes = sum(getattr(file.source, "working_bytes", 0) for file in files)
        self.limits = limits
        self._offsets: dict[int, int] = {}
        #: The checkpoint whose files these are, if it closes them.
        self._lender = lender
        self._closed = False

    @classmethod
    def open(
        cls,
        source: CheckpointSource,
        *,
        key: str | None = None,
        limits: Limits | None = None,
        encoding: str = TEXT_ENCODING,
    ) -> Self:
        """Open a checkpoint; see ``sluice.open`` for the arguments and errors.

        If ``source`` is an open checkpoint, the result is a view of its part at ``key`` and shares its files, which
        stay open when the view is closed.
        """
        lender = source if isinstance(source, OpenCheckpoint) else None
        if hasattr(source, "open_checkpoint"):  # a comparison with the protocol takes 20 times as long
            source = source.open_checkpoint(limits or DEFAULT_LIMITS, check_encoding(encoding))
        if isinstance(source, OpenCheckpoint):
            opened = cls(source.path, source.index, source.open_files, source.limits, source.place, lender)
        else:
            limits, encoding = limits or DEFAULT_LIMITS, check_encoding(encoding)
            opened = cls.of_layout(classify(source, limits), limits, encoding)
        if key is not None:
            try:
                part = subtree(opened.index.tree, key)
                if isinstance(part, Opaque):
                    raise trees.refusal(part, key, opened.path)
                opened.index = replace(opened.index, tree=part)
            except BaseException as error:
                opened.close()
                _name_file(error, opened.path)
                raise
        return opened

    @classmethod
    def of_layout(cls, layout: CheckpointLayout, limits: Limits, encoding: str) -> Self:
        """Open the files of a layout; raises as ``opening.open_layout`` does."""
        index, files = open_layout(layout, limits, encoding)
        place = layout.place
        if place.stream is not None:
            place.stream.seek(files[0].end)
        return cls(place.title or layout.path, index, files, limits, place)

    @property
    def format(self) -> str:
        """Name of the format.

        ``"torch-zip"``, ``"torch-legacy"``, ``"safetensors"`` or ``"gguf"`` for a file; ``"torch-script"`` or
        ``"torch-export"`` for a program;
        ``"huggingface-safetensors"`` or ``"huggingface-bin"`` for a Hugging Face directory or a shard index;
        ``"safetensors-parts"``, ``"torch-parts"`` or ``"gguf-parts"`` for parts without an index;
        ``"per-parameter"`` for one file per parameter; ``"torch-ranks"`` for directories with a file of each rank;
        ``"torch-sharded"`` for files of FSDP1's ranks; ``"deepspeed-zero"`` or ``"deepspeed-universal"`` for those of
        DeepSpeed; ``"torch-distributed"`` for a directory of torch.distributed.checkpoint. In a tar archive after
        ``"tar-"``.
        """
        return self.index.format

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files that hold its data."""
        return tuple(dict.fromkeys(file.path for file in self.index.files))

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data; bytes that several tensors share count once."""
        return sum(storage.nbytes for storage in self.index.storages)

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata strings of the file; of several files, those that all of them share."""
        return self.index.metadata

    def refuse_cast(self, dtype: str | None) -> None:
        """Raise ``MismatchError`` if a dtype would cast scales of weights that torchao quantized, by the metadata."""
        names = self.metadata.get("tensor_names", "")  # as JSON
        described = (text for name, text in self.metadata.items() if f'"{name}"' in names)
        if dtype is None or not any('"_type"' in text and '"Tensor"' not in text for text in described):
            return
        if any(is_castable(entry.dtype) and entry.dtype != dtype for entry in self.entries.values()):
            problem = "dtype= would cast the scales of quantized weights"
            raise MismatchError(problem, file=self.path, found=dtype, advice="Leave it out.")

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The record of every tensor by its dotted name."""
        if self._lender is not None and self.index is self._lender.index:
            return self._lender.entries
        return trees.flatten(self.index.tree, self.limits)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files, ready to be read.

        Raises:
            ValueError: The checkpoint is closed.
        """
        self.refuse_closed()
        return tuple(file.source for file in self.open_files)

    @cached_property
    def stored_names(self) -> Mapping[str, str]:
        """Names that the metadata of other safetensors writers maps to the name of a stored tensor, with that name.

        They may be further names of that tensor, but they may also be any other text: see
        ``formats.safetensors.header``. They therefore count only for a caller that knows the name.
        """
        texts = self.metadata
        if "safetensors" not in self.index.format or texts.keys() <= {"format"}:  # {"format": "pt"} is not a tie
            return {}
        own = {*self.entries, "format"}
        return {name: text for name, text in texts.items() if text in self.entries and name not in own}

    def tree_with_ties(self, tensors: Iterable[tuple[str, ...]]) -> object:
        """Return the tree of the index with the ``stored_names`` of tensors, of each of which no name has an entry."""
        tree, ties = self.index.tree, self.stored_names
        if not ties or not isinstance(tree, dict):
            return tree
        lacking = (names for names in tensors if not any(name in self.entries for name in names))
        found = {name: self.entries[ties[name]] for names in lacking for name in names if name in ties}
        return type(tree)({**tree, **found}) if found else tree

    def checksums(self) -> list[list[Checksum | CheckpointError]]:
        """Return the checksums that each file records, and an error for each damaged header in place of its checksum.

        Raises:
            ValueError: The checkpoint is closed.
        """
        self.refuse_closed()
        return [file.checksums(self.limits) for file in self.open_files]

    @property
    def source_notes(self) -> list[str]:
        """Remarks of the files for the report of a load, one sentence for each different one; also after closing.

        A source that has a remark, such as why it was not cached, has an attribute ``note`` with it, a clause or None.
        """
        paths: defaultdict[str, list[str]] = defaultdict(list)
        for file in self.open_files:
            if note := getattr(file.source, "note", None):
                paths[note].append(file.source.path)
        return [f"{files[0] if len(files) == 1 else f'{len(files)} files'}: {note}" for note, files in paths.items()]

    def locate(self, storages: Iterable[int], *, at_once: bool = False) -> dict[int, int]:
        """Return the data offset of each of ``storages`` that the index has not located; headers are checked once.

        Args:
            storages: Positions in the index.
            at_once: Whether to check headers now: where requests are expensive, they are otherwise checked when the
                data after them is read.

        Raises:
            FormatError: A header is damaged.
        """
        self.refuse_closed()
        wanted: defaultdict[int, list[int]] = defaultdict(list)
        for number in () if self.index.located else set(storages) - self._offsets.keys():
            storage = self.index.storages[number]
            if not storage.located:
                wanted[storage.file].append(number)
        for position, numbers in wanted.items():
            self._offsets.update(self.open_files[position].locate(numbers, at_once=at_once))
        return self._offsets

    def close(self) -> None:
        """Release the files. Tensors that were read stay valid; further reads raise ``ValueError``."""
        self._closed = True
        for file in self.open_files if self._lender is None else ():
            file.source.close()

    def refuse_closed(self) -> None:
        """Raise ValueError if it is closed."""
        if self._closed:
            raise ValueError("the checkpoint is closed")
        if self._lender is not None:
            self._lender.refuse_closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@runtime_checkable
class OpensItself(Protocol):
    """A source that is more than a place."""

    def open_checkpoint(self, limits: Limits, encoding: str) -> OpenCheckpoint:
        """Return the checkpoint, which the caller closes."""
        ...

    def __str__(self) -> str:
        """Return its title."""
        ...


#: Types of every ``source`` argument.
CheckpointSource: TypeAlias = "SourceLocation | Sequence[PathOrAddress] | OpenCheckpoint | OpensItself"


def check_encoding(encoding: str) -> str:
    """Return the name of an encoding.

    Raises:
        ValueError: Python has no encoding of text with this name.
        TypeError: It is not a text.
    """
    if not isinstance(encoding, str):
        raise TypeError(f"encoding= is {type_of(encoding)}; write a text such as 'latin1', or 'bytes'")
    if encoding != BYTES_ENCODING:
        try:
            " ".encode(encoding)
        except (LookupError, ValueError):  # a null character, and the encoding 'undefined', which encodes nothing
            expected = "'utf-8', 'latin1', 'ascii', another encoding that Python knows, or 'bytes'"
            raise ValueError(f"encoding: {encoding!r} is not an encoding of text; expected {expected}") from None
    return encoding


@contextmanager
def borrow(
    source: CheckpointSource, *, limits: Limits | None = None, encoding: str = TEXT_ENCODING, alone: bool = True
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint for the block; a checkpoint that is already open stays open.

    Unless the block works on others, too, its errors name the checkpoint if they name no file.
    """
    checkpoint = (
        source if isinstance(source, OpenCheckpoint) else OpenCheckpoint.open(source, limits=limits, encoding=encoding)
    )
    try:
        yield checkpoint
    except (CheckpointError, MismatchError, PartialLoadError) as error:
        if alone:
            _name_file(error, checkpoint.path)
        raise
    finally:
        if checkpoint is not source:
            checkpoint.close()


def _name_file(error: BaseException, path: str) -> None:
    """Name the checkpoint in an error that names no file."""
    if isinstance(error, SluiceError) and error.file is None:
        error.file = path
