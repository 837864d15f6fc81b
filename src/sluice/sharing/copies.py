"""Find or build the finished copy of a checkpoint; the first process builds it, and the others wait."""

from __future__ import annotations

import logging
import os
import time
import weakref
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Self

from sluice._errors import SaveError
from sluice._options import MemoryLimits
from sluice._progress import Progress
from sluice._public import public
from sluice.sharing.requests import CopyRequest
from sluice.sharing.store import FILE, lock_free, lock_shared, make_room, remove
from sluice.sources.descriptors import OwnedFile

__all__ = ["SharedCopy", "builder", "find_or_build"]

_log = logging.getLogger("sluice")

#: Seconds between two looks at the lock of a builder, until a word is logged, and until waiting is given up.
_LOOK_SECONDS, _WORD_SECONDS, _WAIT_SECONDS = 0.02, 10.0, 1800.0


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

    def __init__(self, path: str, lock: OwnedFile, *, built: bool) -> None:
        self.path = path
        self.key = os.path.basename(os.path.dirname(path))
        self.nbytes = os.lstat(path).st_size
        self.built = built
        self._lock: OwnedFile | None = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"SharedCopy({self.path!r})"

    def close(self) -> None:
        """End the use of the copy, except by models that were loaded from it."""
        self._lock = None

    def hold_for(self, user: object) -> None:
        """Keep the copy as long as an object lives."""
        if self._lock is None:
            raise ValueError("the shared copy is closed")
        weakref.finalize(user, _let_go, self._lock).atexit = False


def _let_go(_: OwnedFile) -> None:
    """Drop the last reference to a lock."""


def builder() -> ModuleType:
    """Return the module that writes copies."""
    from sluice.sharing import building  # here, not above: most processes find a copy

    return building


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
        if (free := lock_free(folder)) is not None:
            try:
                if not path.is_file():
                    build = partial(builder().convert, request, path)
                    make_room(store, sum(build(dry_run=True).file_bytes), max_bytes)
                    build(memory=memory, progress=progress)
                    built = True
            except BaseException:
                remove(folder)
                raise
            finally:
                free.close()
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
