"""Find or build the finished copy of a checkpoint; whoever comes first builds, and the others wait."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Self, cast

from msgspec import Struct
from msgspec.structs import replace

from sluice import __version__
from sluice._dtypes import is_castable
from sluice._errors import SaveError, UnsupportedError
from sluice._options import MemoryLimits
from sluice._progress import Progress
from sluice._public import public
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.contents import flat_contents
from sluice.converting.convert import convert_checkpoint
from sluice.converting.entries import Entries
from sluice.entries.rules import Rule
from sluice.formats.safetensors.ties import declare_ties
from sluice.matching.renaming import Rename
from sluice.records import Entry
from sluice.reports.save import SaveReport
from sluice.sharing.store import FILE, lock_free, lock_shared, make_room, remove
from sluice.writing.durable.partial_files import close
from sluice.writing.safetensors import lay_out_safetensors
from sluice.writing.save_job import SaveJob

__all__ = ["CopyRequest", "SharedCopy", "find_or_build"]

_log = logging.getLogger("sluice")

#: Seconds between two looks at the lock of a builder, until a word is logged, and until waiting is given up.
_LOOK_SECONDS, _WORD_SECONDS, _WAIT_SECONDS = 0.02, 10.0, 1800.0

#: Size of a key, in bytes: two of 100 million contents are equal by accident once in 10**22 cases.
_KEY_BYTES = 16


@public()
class SharedCopy:
    """A finished copy of a checkpoint for all processes of this host; ``sluice.shared`` returns it.

    It is a source: ``load_into(model, copy)`` maps its pages, and every other function reads its file. While the object
    or a model that was loaded from it lives in any process, the copy is not dropped.

    Attributes:
        path: The safetensors file.
        key: Digest of its contents and of how they were made.
        nbytes: Size of the file.
        built: Whether this call has built it.
    """

    def __init__(self, path: str, descriptor: int, *, built: bool) -> None:
        self.path = path
        self.key = os.path.basename(os.path.dirname(path))
        self.nbytes = os.lstat(path).st_size
        self.built = built
        self._descriptor = descriptor
        self.close = weakref.finalize(self, close, descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"SharedCopy({self.path!r})"

    def hold_for(self, user: object) -> None:
        """Keep the copy as long as an object lives."""
        if not self.close.alive:
            raise ValueError("the shared copy is closed")
        weakref.finalize(user, close, os.dup(self._descriptor))


class CopyRequest(Struct, frozen=True, kw_only=True):
    """What a copy holds: a part of a checkpoint and its changes."""

    checkpoint: OpenCheckpoint
    #: Name of the dtype of real floating-point tensors; None keeps each dtype.
    dtype: str | None = None
    key: str | None = None
    rename: Rename | None = None
    rules: Sequence[Rule] = ()

    def digest(self) -> str:
        """Return the key of the copy: equal only if its bytes are; reads no data.

        Raises:
            UnsupportedError: A file has nothing that tells it from others of its size.
        """
        checkpoint = self.checkpoint
        contents = flat_contents(checkpoint, key=self.key, rename=self.rename, rules=self.rules)
        index = checkpoint.index
        for file in index.files:
            if file.identity.version is None and not file.identity.inode:
                problem = "a source without an inode or a version cannot be shared: its content could be any"
                raise UnsupportedError(problem, file=file.path, advice="Write it to a file first.")
        digest = blake2b(digest_size=_KEY_BYTES)
        identities = [file.identity for file in index.files]
        for part in (__version__, identities, index.storages, index.crcs, sorted(checkpoint.metadata.items())):
            digest.update(repr(part).encode("utf-8", "surrogatepass"))
        for name, entry in cast("Mapping[str, Entry]", contents.tree).items():
            dtype = self.dtype if self.dtype is not None and is_castable(entry.dtype) else entry.dtype
            plain = replace(entry, attributes=None, origin="")
            digest.update(repr((name, entry.cast or dtype, plain)).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def outline(self, path: Path) -> int:
        """Write a file with the header of the copy and a hole for its data, for a plan; return its size."""
        checkpoint = self.checkpoint
        tree = flat_contents(checkpoint, key=self.key, rename=self.rename, rules=self.rules).tree
        with Entries(checkpoint, tree, self.dtype, batch_bytes=1, staging_bytes=1, page_cache="auto") as entries:
            tensors, ties = entries.distinct(pickled=False)
            layout = lay_out_safetensors(entries.outlines(tensors), declare_ties(ties, {"format": "pt"}))
        with path.open("xb") as file:
            file.write(layout.header)
            file.truncate(layout.nbytes)
        return layout.nbytes

    def convert(
        self, path: Path, *, memory: MemoryLimits | None = None, progress: Progress = False, dry_run: bool = False
    ) -> SaveReport:
        """Write the copy to a path, or only lay it out."""
        job = SaveJob(
            destination=path,
            dtype=self.dtype,
            limit_bytes=None,
            metadata={"format": "pt"},
            overwrite=True,  # published by one rename
            progress=progress,
            manifest=None,
            dry_run=dry_run,
        )
        return convert_checkpoint(
            self.checkpoint,
            "safetensors",
            job,
            key=self.key,
            rename=self.rename,
            rules=self.rules,
            memory=memory,
            page_cache="auto",
            started=time.perf_counter(),
        )


def find_or_build(
    request: CopyRequest,
    store: Path,
    *,
    max_bytes: int | None,
    memory: MemoryLimits | None = None,
    progress: Progress = False,
) -> SharedCopy:
    """Return the copy; build it if there is none, and wait while another process builds it.

    Raises:
        BudgetError: There is no room for it.
        SaveError: It could not be written, or another process has not finished in half an hour.
    """
    folder = store / request.digest()
    path, started, said = folder / FILE, time.monotonic(), False
    built = False
    while (shared := lock_shared(folder)) is None:
        free = lock_free(folder)
        if free is not None:
            try:
                if not path.is_file():
                    make_room(store, sum(request.convert(path, dry_run=True).file_bytes), max_bytes)
                    request.convert(path, memory=memory, progress=progress)
                    built = True
            except BaseException:
                remove(folder)
                raise
            finally:
                close(free)
            continue
        waited = time.monotonic() - started
        if waited > _WAIT_SECONDS:
            problem = f"another process has been building the shared copy for {waited:.0f} s"
            raise SaveError(problem, file=str(folder), advice="End that process: its lock ends with it.")
        if waited > _WORD_SECONDS and not said:
            _log.warning("sluice: waiting for another process that builds the shared copy %s", folder)
            said = True
        time.sleep(_LOOK_SECONDS)
    return SharedCopy(str(path), shared, built=built)
