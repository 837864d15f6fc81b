"""Upload files to object stores while they are written, front to back and without a local copy.

A small file is one request. A larger one is an upload of several parts, which becomes an object in one step after the
last byte, or is aborted. A few parts are held in memory.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from sluice import _defaults as defaults
from sluice._errors import SaveError, UnsupportedError
from sluice._threads import Task, Worker, join_threads, start_threads
from sluice.engine.staging import StagingPool
from sluice.records.geometry import round_up
from sluice.sources.remote.location import Remote
from sluice.sources.remote.store_clients import is_store, make_store, obstore_library, parse_address, shown
from sluice.sources.remote.store_errors import is_missing, translated

__all__ = ["Upload", "UploadedFile", "upload_to"]

#: Seconds between two looks whether an upload that takes no bytes has failed.
_LOOK_SECONDS = 0.2


def upload_to(destination: object) -> Upload | None:
    """Return the upload for the address of an object store, or a ``Remote`` with one; None for anything else.

    Raises:
        UnsupportedError: obstore is not installed, or the address has a wrong form.
    """
    if isinstance(destination, Remote):
        if destination.store is not None or not is_store(destination.url):
            advice = "Write the address of an object store: s3://, gs:// or az://."
            raise UnsupportedError("only object stores are written to", file=destination.address, advice=advice)
        return Upload(destination)
    if not isinstance(destination, str) or not is_store(destination) or os.path.lexists(destination):
        return None
    return Upload(Remote(destination))


class Upload:
    """An object or a prefix in a store. If its ``with`` block fails, the objects that were added are removed."""

    def __init__(self, remote: Remote) -> None:
        """Keep the address; nothing is requested.

        Args:
            remote: Address of an object or a prefix.

        Raises:
            UnsupportedError: obstore is not installed, or the address has a wrong form.
        """
        address = parse_address(remote.url)
        self._key = address.key.strip("/")
        self.url = shown(address.root, self._key)
        self._library = obstore_library(self.url)
        self._store = make_store(address, remote, "write")
        #: Keys of objects that are removed if the block fails.
        self.added: list[str] = []

    def __str__(self) -> str:
        return self.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._delete(self.added)

    @property
    def name(self) -> str:
        """The last part of the key, whose suffix names a format."""
        return self._key.rpartition("/")[2]

    def url_of(self, name: str) -> str:
        """Return the address of an object of the prefix; of the object itself for an empty name."""
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    def names(self) -> list[str]:
        """Return the names of the objects of the prefix, without those of deeper ones."""
        prefix = self._key_of("") + "/" if self._key else ""
        with self._refusals():
            listed = self._library.list_with_delimiter(self._store, prefix or None)["objects"]
        return [name for meta in listed if (name := meta["path"].removeprefix(prefix))]

    def read(self, name: str) -> bytes:
        """Return the content of an object."""
        with self._refusals():
            return bytes(self._library.get(self._store, self._key_of(name)).bytes())

    def exists(self, name: str) -> bool:
        """Return whether an object exists."""
        with self._refusals():
            try:
                self._library.head(self._store, self._key_of(name))
            except Exception as error:
                if is_missing(error):
                    return False
                raise
            return True

    def file(self, name: str = "", *, overwrite: bool = True) -> UploadedFile:
        """Return a new object; see ``UploadedFile``."""
        return UploadedFile(self, name, overwrite=overwrite)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, best effort."""
        self._delete([self._key_of(name) for name in names])

    def put(self, name: str, content: Any, *, is_new: bool, **how: Any) -> None:
        """Write an object from bytes, or from an iterator of bytes; ``is_new`` if it is to be removed on a failure."""
        key = self._key_of(name)
        with self._refusals():
            self._library.put(self._store, key, content, **how)
            if is_new:
                self.added.append(key)

    def size(self, name: str) -> int:
        """Return the size of an object, in bytes."""
        with self._refusals():
            return int(self._library.head(self._store, self._key_of(name))["size"])

    def _key_of(self, name: str) -> str:
        return f"{self._key}/{name}".strip("/") if name else self._key

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(self._library.exceptions.BaseError, OSError):
                self._library.delete(self._store, key)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn errors of the store in the block into ``SaveError``."""
        errors = self._library.exceptions.BaseError, FileNotFoundError, FileExistsError, PermissionError, ValueError
        try:
            yield
        except errors as error:
            if type(error).__name__ in {"AlreadyExistsError", "FileExistsError"}:
                raise _ExistsError(self.url) from None
            found = translated(error, self.url, pinned=False)
            problem, advice = getattr(found, "problem", str(found)), getattr(found, "advice", None)
            usual = "Check the address, the credentials and the network, then save again."
            raise SaveError(problem, file=self.url, advice=advice or usual) from None


class UploadedFile:
    """A file that is written from its first byte to its last, and becomes an object when ``commit`` is called."""

    def __init__(self, upload: Upload, name: str, *, overwrite: bool) -> None:
        self.path = upload.url_of(name)
        self._upload = upload
        self._name = name
        self._overwrite = overwrite
        self._part_bytes = defaults.UPLOAD_PART_BYTES
        self._at = 0
        self._held = bytearray()
        # Not a Queue with a bound, whose lock an interrupt can leave locked.
        self._pieces: queue.SimpleQueue[bytes | _AbandonedError | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[Worker] = []
        self._task: Task[None] | None = None

    def __enter__(self) -> Self:
        self._is_new = not self._upload.exists(self._name)
        if not self._overwrite and not self._is_new:
            raise SaveError("the file already exists; pass overwrite=True to replace it", file=self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:  # not committed
            self._pieces.put(_AbandonedError())
            with suppress(SaveError, _AbandonedError):
                self._finish()

    def reserve(self, nbytes: int, staging: StagingPool | None = None) -> None:  # noqa: ARG002 - as for local files
        """Choose the size of parts for a file of ``nbytes`` bytes."""
        self._part_bytes = max(self._part_bytes, round_up(-(-nbytes // defaults.UPLOAD_PARTS), 1 << 20))

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Append ``data``, whose ``offset`` is the end of the file."""
        assert offset == self._at, (self.path, offset, self._at)
        view = memoryview(data).cast("B")
        self._at += len(view)
        for first in range(0, len(view), defaults.UPLOAD_PIECE_BYTES):
            self._held += view[first : first + defaults.UPLOAD_PIECE_BYTES]
            if self._task is None and len(self._held) > self._part_bytes:
                self._begin_parts()
            if self._task is not None and len(self._held) >= defaults.UPLOAD_PIECE_BYTES:
                self._hand_over()

    def commit(self, *, nbytes: int | None = None) -> None:
        """Make the object visible.

        Args:
            nbytes: Size of the file in bytes, which must be what was written.

        Raises:
            SaveError: The store failed or refused. An existing object is intact, unless only its size is wrong.
        """
        assert nbytes in {None, self._at}
        if self._task is None:
            mode = "overwrite" if self._overwrite else "create"
            self._upload.put(self._name, bytes(self._held), is_new=self._is_new, mode=mode)
        else:
            self._hand_over()
            if not self._overwrite and self._upload.exists(self._name):  # a condition is possible only for one part
                raise _ExistsError(self.path)
            self._pieces.put(None)
            self._finish()
        found = self._upload.size(self._name)
        if found != self._at:
            problem = "the store holds another number of bytes"
            raise SaveError(problem, file=self.path, expected=self._at, found=found)

    def _begin_parts(self) -> None:
        for _ in range(defaults.UPLOAD_PIECES):
            self._room.put(None)
        self._task = Task(self._send)
        start_threads(self._threads, 1, self._task.run, "sluice-upload")
        if not self._threads:
            self._task = None
            raise SaveError("the upload needs a thread, and the process may not start one", file=self.path)

    def _send(self) -> None:
        interrupts: list[BaseException] = []
        how = {"chunk_size": self._part_bytes, "max_concurrency": defaults.UPLOADS, "use_multipart": True}
        try:
            self._upload.put(self._name, self._sent(interrupts), is_new=self._is_new, **how)
        except SaveError:
            if interrupts:  # the upload could not be aborted, for which obstore raises instead
                raise interrupts[0] from None
            raise

    def _sent(self, interrupts: list[BaseException]) -> Iterator[bytes]:
        """Yield what was written. An exception here aborts the upload."""
        try:
            while (piece := self._pieces.get()) is not None:
                if not isinstance(piece, bytes):
                    raise piece
                yield piece
                self._room.put(None)
        except BaseException as error:
            interrupts.append(error)
            raise

    def _hand_over(self) -> None:
        """Pass on what is held, once there is room for it."""
        while True:
            with suppress(queue.Empty):
                self._room.get(timeout=_LOOK_SECONDS)
                break
            if not self._threads[0].unfinished:
                self._finish()
                raise SaveError("the upload ended early", file=self.path)
        self._pieces.put(bytes(self._held))
        self._held.clear()

    def _finish(self) -> None:
        """Wait for the thread, and raise its failure."""
        join_threads(self._threads)
        task, self._task = self._task, None
        if task is not None and all(thread.ident is not None for thread in self._threads):
            task.result()


class _AbandonedError(Exception):
    """The file was not committed."""


class _ExistsError(SaveError):
    """The object was created by another process."""

    def __init__(self, url: str) -> None:
        super().__init__("another process created the object in the meantime", file=url)
