"""The arguments of a save or a conversion, and the files that it has written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field

from sluice import _defaults as defaults
from sluice._errors import SaveError
from sluice._progress import Progress, byte_progress
from sluice.writing.durable.replacement import Replacement
from sluice.writing.manifest import ManifestWriter
from sluice.writing.uploads import Upload, UploadedFile
from sluice.writing.write_queue import Staging

__all__ = ["SaveJob", "SavedFiles"]


class SaveJob(Struct, frozen=True, kw_only=True):
    """The arguments of one save or conversion."""

    #: The file or directory to write.
    destination: Path | Upload
    #: Dtype that real floating-point tensors are cast to; None keeps each dtype.
    dtype: str | None
    #: Bytes of tensors in one shard; None for a single file.
    limit_bytes: int | None
    #: Text for the headers of safetensors files.
    metadata: Mapping[str, str]
    #: Whether existing files may be replaced.
    overwrite: bool
    #: Buffers for tensors that are cast, strided or on an accelerator.
    staging: Staging = field(default_factory=lambda: Staging.make(defaults.SAVE_STAGING_BYTES))
    #: Writer of the manifest; None if none was requested.
    manifest: ManifestWriter | None
    #: Progress bar or function.
    progress: Progress
    #: Whether to lay out only and write nothing.
    dry_run: bool = False

    @property
    def in_order(self) -> bool:
        """Whether each file is written from its first byte to its last."""
        return isinstance(self.destination, Upload)

    def file(self) -> Replacement | UploadedFile:
        """Return the file at the destination, which is written in its ``with`` block.

        Raises:
            SaveError: It exists and may not or cannot be replaced.
        """
        if isinstance(self.destination, Upload):
            return self.destination.file(overwrite=self.overwrite)
        return Replacement(self.destination, overwrite=self.overwrite or self.dry_run)

    def existing(self) -> tuple[str, ...]:
        """Return the path of the file at the destination if it exists."""
        found = (
            self.destination.exists("") if isinstance(self.destination, Upload) else os.path.lexists(self.destination)
        )
        return (str(self.destination),) if found else ()

    def header(self) -> Mapping[str, str]:
        """Return the text for a safetensors header.

        Raises:
            SaveError: It is not text.
        """
        invalid = next((part for item in self.metadata.items() for part in item if not isinstance(part, str)), None)
        if invalid is not None:
            raise SaveError("safetensors metadata must map text to text", found=repr(invalid))
        return self.metadata

    @contextmanager
    def counting(self, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that is called with the bytes of each piece and reports their sum."""
        if self.dry_run:
            yield lambda _: None
            return
        with byte_progress(self.progress, str(self.destination), total_bytes) as report:
            done = 0

            def wrote(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                if report:
                    report(done)

            yield wrote


class SavedFiles(Struct, frozen=True, kw_only=True):
    """The files of one save, or those that it would write."""

    #: Size of each file, by its path or address; the index of a sharded model is the last.
    files: Mapping[str, int]
    #: Number of names with a tensor.
    tensors: int
    #: Bytes of tensor data.
    nbytes: int
    #: Names that are not stored because another name has the same tensor: ``{name: stored name}``.
    tied: Mapping[str, str] = field(default_factory=dict)
    #: Files that existed before.
    replaced: tuple[str, ...] = ()
    #: Number of cast tensors by pair of dtypes.
    casts: Mapping[str, int] = field(default_factory=dict)
    #: Bytes of tensor data that each rank wrote; empty if one process wrote all of it.
    ranks: tuple[int, ...] = ()
