"""Files of fsspec file systems: any scheme that fsspec or an installed package of its kind knows.

A range is read with ``cat_file`` in pieces, because each piece takes memory in addition to the target. fsspec
cannot make a request conditional: the file is examined again at the end, as local files are. File systems without
asyncio, such as FTP and SFTP, share one connection and take one request at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast
from weakref import WeakKeyDictionary

from fsspec.core import url_to_fs
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._errors import MissingFileError, RemoteError, SourceChangedError, UnsupportedError
from sluice.sources.directory import EntryKind
from sluice.sources.protocol import Source
from sluice.sources.remote.directory import RemoteDirectory, RemoteEntry
from sluice.sources.remote.file import RemoteFile, remote_access
from sluice.sources.remote.location import Remote
from sluice.sources.remote.protocol import ObjectFacts, PieceBody, RequestFailedError
from sluice.sources.remote_names import without_credentials

__all__ = ["FilesystemFile", "open_directory", "open_source"]

#: Keys of ``info`` that identify the bytes, and those that hold the time of the last change.
_VERSIONS = ("ETag", "etag", "e_tag", "VersionId", "version_id", "generation", "CRC", "checksum")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "modify", "updated", "created", "date_time")

#: Errors that another attempt does not cure; ``OSError`` and errors of network libraries may be temporary.
_FINAL = (
    PermissionError,
    IsADirectoryError,
    RuntimeError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ImportError,
)

_KINDS: dict[str, EntryKind] = {"file": "file", "directory": "directory", "link": "link"}

_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()


def open_source(remote: Remote) -> Source:
    """Return the file at a URL, or at a path in a file system that the user has made.

    Raises:
        MissingFileError: There is no such file.
        UnsupportedError: fsspec does not know the scheme, or its package is not installed.
        RemoteError: The file cannot be read.
    """
    return FilesystemFile(*_resolved(remote))


def open_directory(remote: Remote) -> RemoteDirectory | None:
    """Return the directory at an address; None if there is a file, or nothing; raises as ``open_source`` does."""
    filesystem, path, shown = _resolved(remote)
    with _failures(shown):
        found = filesystem.isdir(path)
    if not found:
        return None
    path, shown = path.rstrip("/"), shown.rstrip("/")

    def opened(name: str) -> Source:
        return FilesystemFile(filesystem, f"{path}/{name}", f"{shown}/{name}")

    return RemoteDirectory(shown, lambda: _listing(filesystem, path, shown), opened)


class FilesystemFile(RemoteFile):
    """A file of fsspec; see ``Source``."""

    pinned = False

    def __init__(self, filesystem: Any, path: str, shown: str) -> None:
        """Examine the file, and read its first bytes.

        Args:
            filesystem: The file system.
            path: Path in it.
            shown: Address for messages, without credentials.
        """
        self._object = _FilesystemObject(filesystem, path, shown)
        access = replace(
            remote_access(defaults.FSSPEC_REQUESTS if _is_parallel(filesystem) else 1),
            request_bytes=defaults.FSSPEC_READ_BYTES,
            gap_bytes=defaults.FSSPEC_GAP_BYTES,
            joins_reads=False,
        )
        self._was_closed = False
        super().__init__(self._object, access=access)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        if self._was_closed:  # as a local file is examined when it is opened again
            self._compare()
            self._was_closed = False
        return super().read_into(offset, buffer, direct=direct)

    def close(self) -> None:
        super().close()
        self._was_closed = True

    def check_unchanged(self) -> None:
        super().check_unchanged()
        self._compare()

    def _compare(self) -> None:
        try:
            found = self._object.facts()
        except MissingFileError as error:
            raise SourceChangedError("the file was removed while it was being read", file=self.path) from error
        except RequestFailedError as error:
            raise RemoteError(error.problem, file=self.path) from error
        if found != self.facts:
            raise self.facts.replaced("the file was changed while it was being read", self.path, found)


class _FilesystemObject:
    """One file of a file system; see ``RemoteObject``."""

    def __init__(self, filesystem: Any, path: str, shown: str) -> None:
        self._filesystem, self._path = filesystem, path
        self.path, self._pid = shown, os.getpid()
        parallel = _is_parallel(filesystem)
        self._lock = nullcontext() if parallel else _locks.setdefault(filesystem, threading.Lock())

    def facts(self) -> ObjectFacts:
        """Return what the file system says about the file now.

        Raises:
            RequestFailedError: It does not answer.
            MissingFileError: There is no such file.
        """
        info = self._call(_fresh_info, self._filesystem, self._path)
        if info.get("type") == "directory":
            raise MissingFileError("it is a directory, not a file", file=self.path)
        size = info.get("size")
        if not isinstance(size, int):
            problem = "the file system does not say how large the file is"
            raise UnsupportedError(problem, file=self.path, advice="Download the checkpoint first.")
        return ObjectFacts(nbytes=size, version=_first(info, _VERSIONS), modified=_first(info, _TIMES))

    def open_first(self, nbytes: int) -> tuple[ObjectFacts, PieceBody]:
        facts = self.facts()
        return facts, self._body(0, min(nbytes, facts.nbytes))

    def open_range(self, offset: int, nbytes: int, facts: ObjectFacts) -> PieceBody:  # noqa: ARG002  (checked at the end)
        return self._body(offset, offset + nbytes)

    def close(self) -> None:
        """Do nothing: file systems belong to fsspec, which keeps one for each set of options."""

    def _body(self, start: int, end: int) -> PieceBody:
        def pieces() -> Iterator[bytes]:
            at = start
            while at < end:
                until = min(end, at + defaults.FSSPEC_READ_BYTES)
                data = self._call(self._filesystem.cat_file, self._path, start=at, end=until)
                if not isinstance(data, bytes) or len(data) > until - at:
                    raise RequestFailedError("the file system returned other bytes than the range", temporary=False)
                if not data:
                    return
                at += len(data)
                yield data

        return PieceBody(pieces())

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self._pid != os.getpid() and _is_parallel(self._filesystem):
            problem = "this file system cannot be read in a process that was forked from one that has read it"
            raise UnsupportedError(problem, file=self.path, advice="Start processes with 'spawn' or 'forkserver'.")
        try:
            with self._lock:
                return function(*args, **kwargs)
        except FileNotFoundError as error:
            raise MissingFileError("there is no such file", file=self.path, advice="Check the address.") from error
        except Exception as error:  # noqa: BLE001  (each file system has errors of its own)
            raise _failure(error) from None


def _resolved(remote: Remote) -> tuple[Any, str, str]:
    """Return the file system of an address, the path in it, and the address without credentials."""
    if remote.store is not None:
        return remote.store, remote.url, _shown(remote.store, remote.url)
    url, shown = remote.url, remote.address
    if remote.headers or remote.verify is not True or remote.timeout is not None or remote.cert:
        problem = "headers=, verify=, cert= and timeout= are for http and object stores; fsspec reads this address"
        raise UnsupportedError(problem, file=shown, advice="Write them in options=, as the file system names them.")
    try:
        with _failures(shown, but=(ImportError, ValueError, FileNotFoundError)):  # some make a connection here
            filesystem, path = url_to_fs(url, **(remote.options or {}))
    except ImportError as error:
        raise UnsupportedError("fsspec needs another package for it", file=shown, advice=f"{error}.") from error
    except ValueError as error:
        scheme = url.partition("://")[0]
        problem = f"fsspec has no file system for {scheme!r}, or it does not take the address or the options"
        advice = "fsspec.available_protocols() lists the schemes."
        raise UnsupportedError(problem, file=shown, advice=advice) from error
    except FileNotFoundError as error:
        raise MissingFileError("there is no such file", file=shown, advice="Check the address.") from error
    return filesystem, path, shown


def _listing(filesystem: Any, path: str, shown: str) -> Iterator[RemoteEntry]:
    with _failures(shown, "the directory cannot be listed: "):
        listing = filesystem.ls(path, detail=True)
    for info in listing:
        name = str(info["name"]).rstrip("/").rpartition("/")[2]
        if name:
            yield RemoteEntry(name, _KINDS.get(info.get("type", ""), "special"))


@contextmanager
def _failures(shown: str, what: str = "", *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn errors of a file system in the block into ``RemoteError``, but those of some classes."""
    try:
        yield
    except but:
        raise
    except Exception as error:  # noqa: BLE001  (each file system has errors of its own)
        raise RemoteError(f"{what}{_failure(error)}", file=shown) from None


def _fresh_info(filesystem: Any, path: str) -> dict[str, Any]:
    """Return what a file system says about a file, not what it remembers of a listing."""
    parent = path.rstrip("/").rpartition("/")[0]
    filesystem.invalidate_cache(parent)
    return cast("dict[str, Any]", filesystem.info(path))


def _failure(error: Exception) -> RequestFailedError:
    """Return the signal for an error of a file system, with its class only: its text may hold secrets."""
    number = error.errno if isinstance(error, OSError) else None
    text = f": {os.strerror(number)}" if isinstance(number, int) and number > 0 else ""
    problem = f"the file system failed ({type(error).__name__}{text})"
    return RequestFailedError(problem, temporary=not isinstance(error, _FINAL))


def _first(info: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((str(info[key]) for key in keys if info.get(key) is not None), None)


def _is_parallel(filesystem: Any) -> bool:
    """Return whether a file system takes several requests at once."""
    return bool(getattr(filesystem, "async_impl", False))


def _shown(filesystem: Any, path: str) -> str:
    try:
        return without_credentials(str(filesystem.unstrip_protocol(path)))
    except (NotImplementedError, ValueError, TypeError):
        return path
