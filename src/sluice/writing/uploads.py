"""Save to object stores: files are completed in a temporary directory, then uploaded, the one that commits them last.

The temporary directory is a mirror of the destination: its existing objects are empty files there, except for the
index. So the names of shards, the refusal to replace a model and the files that a new model makes obsolete are decided
by the code that writes to disks. An upload of several parts becomes an object in one step, or is aborted.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sluice import _defaults as defaults
from sluice._errors import CheckpointError, SaveError, SluiceError, UnsupportedError
from sluice._geometry import round_up
from sluice.sources.remote.location import Remote
from sluice.sources.remote.protocol import RemoteSettings, RequestFailedError
from sluice.sources.remote.store_clients import is_store, make_store, obstore_library, parse_address, shown
from sluice.sources.remote.store_errors import is_missing, translated

__all__ = ["Upload", "upload_to"]

#: Files that make the others a checkpoint, by the ends of their names.
_LAST = (".index.json", ".metadata")


def upload_to(destination: object) -> Upload | None:
    """Return the upload for the address of an object store, or a ``Remote`` with one; None for anything else.

    Raises:
        UnsupportedError: obstore is not installed, or the address has a wrong form.
    """
    if isinstance(destination, Remote):
        if destination.store is not None or not is_store(destination.url):
            advice = "Write the address of an object store: s3://, gs:// or az://."
            raise UnsupportedError("only object stores are written to", file=destination.address, advice=advice)
        return Upload(destination.url, destination.settings)
    if not isinstance(destination, str) or not is_store(destination) or os.path.lexists(destination):
        return None
    return Upload(destination)


class Upload:
    """A destination in an object store; lends a local path in its ``with`` block, whose files ``commit`` uploads."""

    def __init__(self, url: str, settings: RemoteSettings | None = None) -> None:
        """Keep the address; nothing is requested.

        Args:
            url: Address of an object or a prefix.
            settings: What the user says about the server.

        Raises:
            UnsupportedError: obstore is not installed, or the address has a wrong form.
        """
        address = parse_address(url)
        self._key = address.key.strip("/")
        self.url = shown(address.root, self._key)
        self._store = make_store(address, settings or RemoteSettings(), "write")
        self._library = obstore_library(self.url)
        self._old: set[str] = set()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix="sluice-upload-")
        #: The local file or directory to write.
        self.path = Path(self._temporary.name) / (self._key.rpartition("/")[2] or "checkpoint")
        try:
            self._mirror()
        except BaseException:
            self._temporary.cleanup()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
        if isinstance(error, SluiceError) and error.file is not None:
            error.file = self.url_of(error.file)

    def url_of(self, path: str) -> str:
        """Return the address of a local file of the upload, and every other path unchanged."""
        local = str(self.path)
        return self.url + path[len(local) :] if path == local or path.startswith(local + os.sep) else path

    def commit(self, files: Sequence[str], *, overwrite: bool) -> None:
        """Upload files, the one that commits them last, and remove objects that were removed from the mirror.

        Args:
            files: Local paths.
            overwrite: Whether existing objects may be replaced.

        Raises:
            SaveError: The store failed or refused. Objects that this call has added are removed.
        """
        added: list[str] = []
        try:
            for file in sorted(dict.fromkeys(files), key=lambda name: name.endswith(_LAST)):
                key = self._key + file[len(str(self.path)) :].replace(os.sep, "/")
                if key not in self._old:
                    added.append(key)
                self._send(file, key.lstrip("/"), replace=overwrite)
        except BaseException as error:
            if not isinstance(error, _ExistsError):
                self._delete(added)
            raise
        self._delete([key for key in self._old if not os.path.lexists(self._local(key))])

    def _local(self, key: str) -> str:
        return str(self.path) + key[len(self._key) :]

    def _mirror(self) -> None:
        """Make an empty file for each existing object, and copies of indexes."""
        with self._refusals():
            prefix = f"{self._key}/" if self._key else ""
            keys = [meta["path"] for meta in self._library.list_with_delimiter(self._store, prefix or None)["objects"]]
            keys = [key for key in keys if key.removeprefix(prefix)]
            if keys:
                self.path.mkdir()
            elif self._key and self._exists(self._key):
                keys = [self._key]
            for key in keys:
                index = self._library.get(self._store, key).bytes() if key.endswith(".index.json") else b""
                Path(self._local(key)).write_bytes(index)
            self._old = set(keys)

    def _send(self, file: str, key: str, *, replace: bool) -> None:
        nbytes = os.path.getsize(file)
        part = max(defaults.UPLOAD_PART_BYTES, round_up(-(-nbytes // defaults.UPLOAD_PARTS), 1 << 20))
        with self._refusals():
            if nbytes <= part:
                mode = "overwrite" if replace else "create"
                self._library.put(self._store, key, Path(file).read_bytes(), mode=mode)
            else:
                if not replace and self._exists(key):  # a condition is possible only for one part
                    raise _ExistsError(self.url)
                self._send_parts(file, key, part)
            found = self._library.head(self._store, key)["size"]
        if found != nbytes:
            raise SaveError("the store holds another number of bytes", file=self.url, expected=nbytes, found=found)

    def _send_parts(self, file: str, key: str, part: int) -> None:
        interrupts: list[BaseException] = []

        def pieces() -> Iterator[bytes]:
            try:
                yield from _pieces(file)
            except BaseException as error:
                interrupts.append(error)
                raise

        try:
            self._library.put(
                self._store, key, pieces(), chunk_size=part, max_concurrency=defaults.UPLOADS, use_multipart=True
            )
        except self._library.exceptions.BaseError:
            if interrupts:  # the upload could not be aborted, for which obstore raises instead
                raise interrupts[0] from None
            raise

    def _exists(self, key: str) -> bool:
        try:
            self._library.head(self._store, key)
        except Exception as error:
            if is_missing(error):
                return False
            raise
        return True

    def _delete(self, keys: Sequence[str]) -> None:
        """Remove objects, best effort."""
        for key in keys:
            with suppress(self._library.exceptions.BaseError, OSError):
                self._library.delete(self._store, key)

    def _refusals(self) -> _Refusals:
        return _Refusals(self._library, self.url)


class _ExistsError(SaveError):
    """The object was created by another process."""

    def __init__(self, url: str) -> None:
        super().__init__("another process created the object in the meantime", file=url)


class _Refusals:
    """Turns errors of obstore in the block into ``SaveError``."""

    def __init__(self, library: Any, url: str) -> None:
        self._library, self._url = library, url

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if type(error).__name__ in {"AlreadyExistsError", "FileExistsError"}:
            raise _ExistsError(self._url) from None
        if not isinstance(error, (self._library.exceptions.BaseError, FileNotFoundError, PermissionError, ValueError)):
            return
        found = translated(error, self._url, pinned=False)
        advice = found.advice if isinstance(found, (RequestFailedError, CheckpointError)) else None
        problem = found.problem if isinstance(found, (RequestFailedError, CheckpointError)) else str(found)
        refused = SaveError(problem, file=self._url)
        refused.advice = advice or "Check the address, the credentials and the network, then save again."
        raise refused from None


def _pieces(file: str) -> Iterator[bytes]:
    """Yield a file in pieces. An exception here, such as an interrupt, aborts the upload."""
    with open(file, "rb") as opened:
        while piece := opened.read(defaults.UPLOAD_PIECE_BYTES):
            yield piece
