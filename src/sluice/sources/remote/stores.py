"""Objects of S3, Google Cloud Storage and Azure, through obstore (the Rust crate object_store).

A body is received in pieces and copied into the caller's memory, so that a request never holds more than a few pieces.
Every request names the ETag of the opened object, and every answer is compared with it, because some servers ignore
the condition. Data of S3 is requested by our own HTTP client, from addresses that obstore signs: that takes half of the
processor time. What is refused is requested by obstore, which also sends what no signature holds, such as keys of
encryption, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace as replaced
from datetime import timedelta
from http import HTTPStatus
from typing import Any

from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._errors import MissingFileError, RemoteError, SluiceError
from sluice.sources.directory import EntryKind
from sluice.sources.protocol import Source
from sluice.sources.remote.directory import RemoteDirectory, RemoteEntry
from sluice.sources.remote.file import RemoteFile, remote_access
from sluice.sources.remote.http import HttpObject
from sluice.sources.remote.location import Remote
from sluice.sources.remote.protocol import (
    Body,
    ObjectFacts,
    PieceBody,
    RemoteObject,
    RequestFailedError,
    WrongResponseError,
)
from sluice.sources.remote.store_clients import (
    make_store,
    obstore_library,
    parse_address,
    root_of,
    shown,
    skips_signatures,
)
from sluice.sources.remote.store_errors import translated
from sluice.sources.remote_names import names_a_file

__all__ = ["StoredObject", "open_directory", "open_source"]

#: Validity of a signature; the request is made at once.
_SIGNED_FOR = timedelta(hours=1)


@contextmanager
def _store_failures(path: str, *, pinned: bool = False) -> Iterator[Any]:
    """Lend obstore; its errors in the block become those of ``translated``."""
    library = obstore_library(path)
    try:
        yield library
    # Its own errors, and builtins for some of them, such as wrong keys.
    except (library.exceptions.BaseError, OSError, NotImplementedError, ValueError) as error:
        raise translated(error, path, pinned=pinned) from None


def open_source(remote: Remote) -> Source:
    """Return the object at ``s3://``, ``gs://``, ``az://`` or ``abfs(s)://``, or at a path in a store of obstore.

    Raises:
        UnsupportedError: obstore is not installed, or the address or an option has a wrong form.
        MissingFileError: There is no such object, or the address names a bucket or ends with a slash.
        RemoteError: The store does not answer.
    """
    if remote.store is not None:
        return _source(StoredObject(remote.store, remote.url, root_of(remote.store), remote))
    address = parse_address(remote.url)
    if not address.key or address.key.endswith("/"):
        problem, path = "there are no objects with this prefix", shown(address.root, address.key)
        raise MissingFileError(problem, file=path, advice="Check the bucket and the prefix.")
    return _source(StoredObject(make_store(address, remote), address.key, address.root, remote))


def open_directory(remote: Remote) -> RemoteDirectory | None:
    """Return the objects with a prefix as a directory; None if there are none, or if the address is that of a file.

    A last part with the suffix of a file is a file without a request; an address that ends with a slash never is.

    Raises:
        UnsupportedError: obstore is not installed, or the address or an option has a wrong form.
        RemoteError: The store does not answer.
        MissingFileError: The bucket does not exist.
    """
    if remote.store is not None:
        prefix, store = remote.url, remote.store
        return None if prefix and names_a_file(prefix) else _listed(store, prefix, root_of(store), remote, lister=store)
    address = parse_address(remote.url)
    if address.key and names_a_file(address.key):
        return None
    store, lister = (make_store(address, remote, purpose) for purpose in ("read", "list"))
    try:
        return _listed(store, address.key, address.root, remote, lister=lister)
    except RemoteError:
        if address.key and not address.key.endswith("/"):
            return None  # to read an object does not need the permission to list, and tells what else is wrong
        raise


def _source(remote: RemoteObject) -> RemoteFile:
    return RemoteFile(remote, access=remote_access(defaults.STORE_REQUESTS))


class StoredObject:
    """One object of a store; see ``RemoteObject``."""

    def __init__(self, store: Any, key: str, root: str, remote: Remote) -> None:
        """Keep the client and the key.

        Args:
            store: A client of obstore.
            key: Key of the object.
            root: Address of the store without credentials, with a slash at the end.
            remote: Settings of requests. Those of a client that the user made are not known.
        """
        self._store, self._key = store, key
        self.path = shown(root, key)
        signs = type(store).__name__ == "S3Store" and remote.store is None
        #: Settings of signed requests; None if none are made, as of public buckets, for which there are no credentials.
        self._signed = replaced(remote, options=None) if signs and not skips_signatures(store) else None
        self._http: HttpObject | None = None

    def open_first(self, nbytes: int) -> tuple[ObjectFacts, PieceBody]:
        try:
            result = self._get({"range": (0, nbytes)}, pinned=False)
        except RequestFailedError as error:
            if error.status != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            # An empty object has no range at all.
            with _store_failures(self.path) as library:
                facts = _facts(library.head(self._store, self._key))
            if facts.nbytes:
                raise
            return facts, PieceBody(iter(()))
        facts = _facts(result.meta)
        self._check_range(result, 0, min(nbytes, facts.nbytes))
        return facts, PieceBody(_pieces(result, self.path))

    def open_range(self, offset: int, nbytes: int, facts: ObjectFacts) -> AbstractContextManager[Body]:
        if (settings := self._signed) is not None and facts.version:
            try:
                # Both clients write times differently.
                return self._at_signed(settings).open_range(offset, nbytes, replace(facts, modified=None))
            except (RequestFailedError, SluiceError) as error:
                if isinstance(error, RequestFailedError) and error.temporary and not error.unreached:
                    raise
                self._signed = None
        wanted: dict[str, Any] = {"range": (offset, offset + nbytes)}
        if facts.version:
            wanted["if_match"] = facts.version
        result = self._get(wanted, pinned=True)
        found = _facts(result.meta)
        if found != facts:
            raise facts.replaced("the object was replaced while it was being read", self.path, found)
        self._check_range(result, offset, offset + nbytes)
        return PieceBody(_pieces(result, self.path))

    def close(self) -> None:
        if self._http is not None:  # those of obstore are closed with the client, when its last object is collected
            self._http.close()

    def _at_signed(self, settings: Remote) -> HttpObject:
        """Return the object at an address with a new signature, which takes 10 µs, for the request that is made now."""
        with _store_failures(self.path) as library:
            url = library.sign(self._store, "GET", self._key, _SIGNED_FOR)
        if self._http is None:
            self._http = HttpObject(replaced(settings, url=url), shown=self.path)
        self._http.move_to(url)
        return self._http

    def _get(self, wanted: dict[str, Any], *, pinned: bool) -> Any:
        with _store_failures(self.path, pinned=pinned) as library:
            return library.get(self._store, self._key, options=wanted)

    def _check_range(self, result: Any, start: int, end: int) -> None:
        if tuple(result.range) != (start, end):
            raise WrongResponseError("the store answered with another range than requested")


def _pieces(result: Any, path: str) -> Iterator[bytes]:
    with _store_failures(path, pinned=True):
        yield from result.stream(min_chunk_size=defaults.REMOTE_PIECE_BYTES)


def _facts(meta: Any) -> ObjectFacts:
    tag, modified = meta["e_tag"], meta["last_modified"]
    weak = tag is not None and tag.startswith("W/")
    return ObjectFacts(
        nbytes=int(meta["size"]),
        version=None if weak else tag,
        weak_version=tag if weak else None,
        modified=None if modified is None else modified.isoformat(),
    )


def _listed(store: Any, key: str, root: str, remote: Remote, *, lister: Any) -> RemoteDirectory | None:
    prefix = f"{key.strip('/')}/" if key.strip("/") else ""
    path = shown(root, prefix)
    try:
        with _store_failures(path) as library:
            listing = library.list_with_delimiter(lister, prefix or None)
    except RequestFailedError as failure:
        raise RemoteError(failure.problem, file=path, advice=failure.advice) from None
    names: dict[str, EntryKind] = {meta["path"].removeprefix(prefix): "file" for meta in listing["objects"]}
    names |= {path.rstrip("/").removeprefix(prefix): "directory" for path in listing["common_prefixes"]}
    # Some tools make an empty object with the name of the prefix.
    entries = tuple(RemoteEntry(name, kind) for name, kind in names.items() if name and "/" not in name)
    if not entries:
        return None
    opened = lambda name: _source(StoredObject(store, prefix + name, root, remote))  # noqa: E731
    return RemoteDirectory(path, lambda: entries, opened)
