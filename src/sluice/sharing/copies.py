"""Find or build the finished copy of a checkpoint; the first process builds it, and the others wait."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Self, cast

from msgspec import Struct
from msgspec.structs import replace

from sluice import __version__
from sluice._errors import SaveError, UnsupportedError
from sluice._options import Limits, MemoryLimits
from sluice._progress import Progress
from sluice._public import public
from sluice.adapters.config import Adapter
from sluice.adapters.steps import AdapterFile
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.contents import finished_dtype, flat_contents
from sluice.entries.lookup import subtree
from sluice.entries.rules import Rule
from sluice.entries.tree import every_entry, metadata
from sluice.matching.candidates import extra_states
from sluice.matching.renaming import Rename, Renaming
from sluice.records import Entry
from sluice.sharing.store import FILE, is_finished, lock_free, lock_shared, make_room, remove, seal
from sluice.sources.descriptors import OwnedFile

__all__ = ["CopyRequest", "SharedCopy", "builder", "completed", "find_or_build"]

#: Size of a key, in bytes: two of 100 million contents are equal by accident once in 10**22 cases.
_KEY_BYTES = 16


class CopyRequest(Struct, frozen=True, kw_only=True):
    """Contents of a copy: a part of a checkpoint and its changes."""

    checkpoint: OpenCheckpoint
    #: Name of the dtype of real floating-point tensors; None keeps each dtype.
    dtype: str | None = None
    key: str | None = None
    rename: Rename | None = None
    rules: Sequence[Rule] = ()
    adapters: Sequence[Adapter] = ()

    def contents(self) -> tuple[Mapping[str, Entry], Mapping[str, object]]:
        """Return the records of its tensors by name, before ``dtype``, and the state dict that they come from."""
        contents = flat_contents(self.checkpoint, key=self.key, rename=self.rename, rules=self.rules)
        part = subtree(self.checkpoint.index.tree, contents.key)
        return cast("Mapping[str, Entry]", contents.tree), cast("Mapping[str, object]", part)

    def state(self) -> OrderedDict[str, object]:
        """Return what the file cannot hold of a state dict: versions of modules and extra state that is not a tensor.

        Raises:
            UnsupportedError: Extra state has tensors in it, or is a tensor that the copy changes.
        """
        entries, part = self.contents()
        kept = {id(entry) for entry in entries.values() if finished_dtype(entry, self.dtype) == entry.dtype}
        states = Renaming(self.rename).apply(dict(extra_states(part)))
        dropped = {name for name, value in states.items() if isinstance(value, Entry) and name not in entries}
        state = OrderedDict((n, value) for n, value in states.items() if id(value) not in kept and n not in dropped)
        vars(state).update(getattr(part, "__dict__", {}))
        for name, value in [*state.items(), ("_metadata", metadata(state))]:
            if any(every_entry(value)):
                problem, advice = "a shared copy cannot hold this extra state", "Load with place='map' or place='copy'."
                raise UnsupportedError(problem, file=self.checkpoint.path, tensor=name, advice=advice)
        return state

    def digest(self) -> str:
        """Return the key of the copy: equal only if its bytes are; reads no data.

        Raises:
            UnsupportedError: A file has nothing that tells it from others of its size.
        """
        checkpoint = self.checkpoint
        index = checkpoint.index
        merged = [AdapterFile(each, checkpoint.limits) for each in self.adapters]
        records = zip(index.files, checkpoint.open_files, strict=True)
        files = [file for record, each in records for file in getattr(each.source, "origins", ()) or [record]]
        for file in (*files, *(file for each in merged for file in each.files)):
            if not file.identity.exact:
                problem = "a source without inode, strong ETag or version cannot be shared: its content could be any"
                raise UnsupportedError(problem, file=file.path, advice="Write it to a file first.")
        digest = blake2b(digest_size=_KEY_BYTES)
        steps = [
            (each.config, [file.describe() for file in each.files], each.adapter.weight, each.adapter.prefix)
            for each in merged
        ]
        described = [file.describe() for file in files]
        for part in (__version__, steps, described, index.storages, index.crcs, sorted(checkpoint.metadata.items())):
            digest.update(repr(part).encode("utf-8", "surrogatepass"))
        for name, entry in self.contents()[0].items():
            plain = replace(entry, attributes=None, origin="")
            digest.update(repr((name, finished_dtype(entry, self.dtype), plain)).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def completed(copy: OpenCheckpoint, source: str, state: Mapping[str, object]) -> OpenCheckpoint:
    """Return a view of an open copy under the path of its source, with the state that its file cannot hold."""
    tree = OrderedDict({**cast("dict[str, object]", copy.index.tree), **state})
    vars(tree).update(vars(state))
    return OpenCheckpoint(source, replace(copy.index, tree=tree), copy.open_files, copy.limits, copy.place)


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

    def __init__(self, path: str, lock: OwnedFile, *, built: bool, source: str, state: Mapping[str, object]) -> None:
        self.path = path
        self.key = os.path.basename(os.path.dirname(path))
        self.nbytes = os.lstat(path).st_size
        self.built = built
        self._source, self._state = source, state
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

    def open_checkpoint(self, limits: Limits, encoding: str) -> OpenCheckpoint:
        """Return the open copy under the path of its source, with the state that its file cannot hold."""
        return completed(OpenCheckpoint.open(self.path, limits=limits, encoding=encoding), self._source, self._state)

    def hold_for(self, user: object) -> None:
        """Keep the copy as long as an object lives."""
        if self._lock is None:
            raise ValueError("the shared copy is closed")
        weakref.finalize(user, lambda _: None, self._lock).atexit = False  # which drops a reference to the lock


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
        SaveError: It could not be written, was changed while in use, or is not built by others in half an hour.
    """
    state, folder, used = request.state(), store / request.digest(), 0
    path, started, said, built = folder / FILE, time.monotonic(), False, False
    while (shared := lock_shared(folder)) is None:
        if (free := lock_free(folder)) is not None:
            try:
                if not is_finished(folder):
                    path.unlink(missing_ok=True)  # changed since, or left by a killed builder
                    build = partial(builder().convert, request, path, memory=memory)
                    make_room(store, sum(build(dry_run=True).file_bytes), max_bytes)
                    build(progress=progress)
                    seal(folder, free)
                    built = True
            except BaseException:
                remove(folder)
                raise
            finally:
                free.close()
            continue
        used = 0 if lock_shared(folder, changed=True) is None else used + 1  # others that wait use it for a moment
        if used > _WORD_SECONDS / _LOOK_SECONDS:
            advice = "Delete the models that use it, also those of this process."
            raise SaveError("the shared copy was changed while it is in use", file=str(folder), advice=advice)
        waited = time.monotonic() - started
        if waited > _WAIT_SECONDS:
            problem = f"another process has been building the shared copy for {waited:.0f} s"
            raise SaveError(problem, file=str(folder), advice="End that process: its lock ends with it.")
        if waited > _WORD_SECONDS and not said:
            _log.warning("sluice: waiting for another process that builds the shared copy %s", folder)
            said = True
        time.sleep(_LOOK_SECONDS)
    return SharedCopy(str(path), shared, built=built, source=request.checkpoint.path, state=state)
