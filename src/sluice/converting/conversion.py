"""Records of a conversion: its source, destination and options, and the files that it wrote."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field

from sluice._dtypes import is_castable
from sluice._options import MemoryLimits, PageCache
from sluice._progress import Progress, byte_progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.stream import TargetStream
from sluice.reading.caches import fill_caches
from sluice.records import Entry
from sluice.writing.manifest import ManifestWriter
from sluice.writing.safetensors import TensorOutline
from sluice.writing.save_formats import ConvertFormat

__all__ = ["Conversion", "Written", "existing"]


class Conversion(Struct, frozen=True, kw_only=True):
    """Source, destination and options of a conversion."""

    #: The source.
    checkpoint: OpenCheckpoint
    #: The file or directory to write.
    destination: Path
    #: Format to write.
    save_format: ConvertFormat
    #: Dtype to which real floating-point tensors are cast; None keeps theirs.
    dtype: str | None
    #: Largest size of the tensors in one shard, in bytes; None for a single file.
    limit_bytes: int | None
    #: Whether existing files may be replaced.
    overwrite: bool
    #: Whether to draw a progress bar, or the function that receives its events.
    progress: Progress
    #: Limits of memory growth; None for the defaults.
    memory: MemoryLimits | None
    #: Use of the page cache when the source is read.
    page_cache: PageCache
    #: Receives a hash of each tensor; None for none.
    manifest: ManifestWriter | None
    #: Whether to plan only and write nothing.
    dry_run: bool

    def finished(self, entry: Entry) -> str:
        """Return the dtype of an entry in the file."""
        default = self.dtype if self.dtype is not None and is_castable(entry.dtype) else entry.dtype
        return entry.cast or default

    def casts(self, entries: Iterable[Entry]) -> Counter[str]:
        """Return the number of cast entries by pair of dtypes: ``{"float32 -> bfloat16": 148}``."""
        pairs = ((entry.dtype, self.finished(entry)) for entry in entries)
        return Counter(f"{own} -> {finished}" for own, finished in pairs if own != finished)

    def outlines(self, entries: Mapping[str, Entry]) -> dict[str, TensorOutline]:
        """Return dtype and shape in the file of each entry."""
        return {name: TensorOutline(self.finished(entry), entry.shape) for name, entry in entries.items()}

    def offsets(self, entries: Sequence[Entry]) -> Mapping[int, int]:
        """Check the headers of all data before anything is written; return the offset of each storage, in bytes."""
        return self.checkpoint.locate({number for entry in entries if entry.numel for number in entry.storages})

    @contextmanager
    def stream(self, tensors: int, nbytes: int) -> Iterator[TargetStream]:
        """Lend a stream for ``tensors`` tensors of ``nbytes`` bytes in total, with progress."""
        if nbytes * 2 >= self.checkpoint.nbytes:
            fill_caches(self.checkpoint.sources, progress=self.progress)
        with byte_progress(self.progress, str(self.destination), nbytes) as report:
            stream = TargetStream(
                self.checkpoint, tensors=tensors, memory=self.memory, page_cache=self.page_cache, progress=report
            )
            with stream:
                yield stream


class Written(Struct, frozen=True, kw_only=True):
    """Files that a conversion wrote, or would write."""

    #: Size of each file, in bytes.
    files: Mapping[Path, int]
    #: Files that existed before.
    replaced: tuple[str, ...]
    #: Number of tensors in the files.
    tensors: int
    #: Size of the tensor data, in bytes.
    nbytes: int
    #: Number of cast tensors by pair of dtypes.
    casts: Mapping[str, int]
    #: Names of tied tensors that are not stored, mapped to the stored name.
    tied: Mapping[str, str] = field(default_factory=dict)


def existing(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return the paths that exist."""
    return tuple(str(path) for path in paths if os.path.lexists(path))
