"""What one conversion is asked for, and what it makes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sluice._dtypes import is_castable
from sluice._options import MemoryLimits, PageCache
from sluice._progress import Progress, byte_progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.stream import Stream
from sluice.records import Entry
from sluice.writing.manifest import ManifestWriter
from sluice.writing.safetensors import TensorOutline

__all__ = ["Conversion", "Written", "existing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One conversion, and what was asked for."""

    #: Where the bytes come from.
    checkpoint: OpenCheckpoint
    #: The file or directory.
    destination: Path
    #: Dtype that real floating-point tensors are cast to; None for none.
    dtype: str | None
    #: Bytes of tensors in one shard; None for one file.
    limit_bytes: int | None
    #: Whether what exists may be replaced.
    overwrite: bool
    #: Who hears of it.
    progress: Progress
    #: How much memory may grow; None for the defaults.
    memory: MemoryLimits | None
    #: How the source is read.
    page_cache: PageCache
    #: Gets a hash of each tensor; None for none.
    manifest: ManifestWriter | None
    #: Whether nothing is written.
    dry_run: bool

    def finished(self, entry: Entry) -> str:
        """Return the dtype that an entry has in the file."""
        wanted = self.dtype if self.dtype is not None and is_castable(entry.dtype) else entry.dtype
        return entry.cast or wanted

    def casts(self, entries: Iterable[Entry]) -> Counter[str]:
        """Return how many entries have another dtype in the file, by both dtypes."""
        pairs = ((entry.dtype, self.finished(entry)) for entry in entries)
        return Counter(f"{own} -> {finished}" for own, finished in pairs if own != finished)

    def outlines(self, entries: Mapping[str, Entry]) -> dict[str, TensorOutline]:
        """Return what the file says of each entry."""
        return {name: TensorOutline(self.finished(entry), entry.shape) for name, entry in entries.items()}

    def offsets(self, entries: Sequence[Entry]) -> Mapping[int, int]:
        """Check the headers that belong to the data, before anything is made, and return where it begins."""
        return self.checkpoint.locate({number for entry in entries if entry.numel for number in entry.storages})

    @contextmanager
    def stream(self, tensors: int, nbytes: int) -> Iterator[Stream]:
        """Yield what moves ``tensors`` tensors of ``nbytes`` bytes, and reports it."""
        with byte_progress(self.progress, str(self.destination), nbytes) as report:
            stream = Stream(
                self.checkpoint, tensors=tensors, memory=self.memory, page_cache=self.page_cache, progress=report
            )
            with stream:
                yield stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a conversion made, or would make."""

    #: Bytes of each file.
    files: Mapping[Path, int]
    #: Files that existed.
    replaced: tuple[str, ...]
    #: Tensors in the files.
    tensors: int
    #: Bytes of tensor data.
    nbytes: int
    #: Tensors that are cast, by both dtypes.
    casts: Mapping[str, int]
    #: Names that are not stored, with the one that is.
    tied: Mapping[str, str] = field(default_factory=dict)


def existing(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return those of the paths at which there is something."""
    return tuple(str(path) for path in paths if os.path.lexists(path))
