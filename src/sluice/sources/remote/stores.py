"""Objects of S3, Google Cloud Storage and Azure, through obstore (the Rust crate object_store).

A body is received in pieces and copied into the caller's memory, so that a request never holds more than a few pieces.
Every request names the ETag of the opened object, and every answer is compared with it, because some servers ignore
the condition.

The text of errors of obstore holds the whole answer of the server, which may repeat signatures and key ids. Only the
status, the error code of the store and the kind of failure are taken from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from sluice import _defaults as defaults
from sluice._errors import MissingFileError, RemoteError, SourceChangedError, UnsupportedError
from sluice.sources.directory import EntryKind
from sluice.sources.protocol import Source
from sluice.sources.remote.directory import RemoteDirectory, RemoteEntry
from sluice.sources.remote.file import RemoteFile, remote_access
from sluice.sources.remote.location import Remote
from sluice.sources.remote.protocol import (
    ObjectFacts,
    PieceBody,
    RemoteObject,
    RequestFailedError,
    WrongResponseError,
)
from sluice.sources.remote.store_clients import make_store, obstore_library, parse_address, root_of, shown
from sluice.sources.remote_names import names_a_file

__all__ = ["StoredObject", "is_missing", "open_directory", "open_source", "translated"]

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w{1,30})")

#: Status if the object ends before the range begins.
_OUTSIDE = 416

#: Statuses below 500 after which the same request may succeed.
_TEMPORARY = {408, 425, 429}

#: Parts of requests to the metadata services of clouds, which obstore asks for credentials last.
_METADATA = ("/latest/api/token", "/latest/meta-data/", "metadata.google.internal", "/metadata/identity/")

_FAILURES = {
    "Connect": "the server cannot be reached",
    "Timeout": "the server did not answer in time",
    "Interrupted": "the connection was interrupted",
    "Decode": "the answer cannot be decoded",
}

_CREDENTIALS = {
    "s3": (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL), or "
        "install boto3 to use AWS_PROFILE; AWS_SKIP_SIGNATURE=true reads a public bucket."
    ),
    "gs": (
        "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the file of a service "
        "account; GOOGLE_SKIP_SIGNATURE=true reads a public bucket."
    ),
    "az": (
        "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; "
        "AZURE_SKIP_SIGNATURE=true reads a public container."
    ),
}
_REGION = "Set AWS_REGION to the region of the bucket, and AWS_ENDPOINT_URL if it is not a bucket of AWS."


def is_missing(error: BaseException) -> bool:
    """Return whether an error says that there is no such object or bucket."""
    return isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError"


@contextmanager
def _store_failures(path: str, *, pinned: bool = False) -> Iterator[Any]:
    """Lend obstore; its errors in the block become those of ``translated``."""
    library = obstore_library(path)
    try:
        yield library
    # Its own errors, and builtins for some of them, such as wrong keys.
    except (library.exceptions.BaseError, OSError, NotImplementedError, ValueError) as error:
        raise translated(error, path, pinned=pinned) from None


def translated(error: BaseException, path: str, *, pinned: bool) -> Exception:
    """Return the error to raise instead.

    Args:
        error: An error of obstore.
        path: The object, without credentials.
        pinned: Whether the object has been opened before, so that it is missing because it was removed.
    """
    text = str(error)
    code = found[1] if (found := _CODE.search(text)) else ""
    if code in {"NoSuchBucket", "ContainerNotFound"}:
        return MissingFileError("the bucket does not exist", file=path, advice="Check its name and the endpoint.")
    if is_missing(error):
        if pinned:
            return SourceChangedError("the object was removed while it was being read", file=path)
        return MissingFileError("there is no such object", file=path, advice="Check the bucket and the key.")
    if type(error).__name__ == "PreconditionError" or (pinned and _status_of(text) == _OUTSIDE):
        return SourceChangedError("the object was replaced while it was being read", file=path)
    if type(error).__name__ == "InvalidPathError" or (isinstance(error, ValueError) and "Could not parse path" in text):
        return MissingFileError("the store has no objects with such names", file=path)
    if "non-partial" in text:
        problem = "the server answers requests for a range with the whole object"
        return UnsupportedError(problem, file=path, advice="Download the object and pass its local path.")
    return _failure(error, path, code)


def _failure(error: BaseException, path: str, code: str) -> RequestFailedError:
    """Return what the retries of ``RemoteFile`` judge."""
    text = str(error)
    status = _status_of(text)
    advice: str | None = None
    scheme = path.partition("://")[0].lower()
    credentials = _CREDENTIALS.get({"s3a": "s3", "gs": "gs", "s3": "s3"}.get(scheme, "az"))
    if type(error).__name__ in {"PermissionDeniedError", "UnauthenticatedError", "PermissionError"} or (
        status in {401, 403}
    ):
        return _final(f"the store refused access{_in_brackets(status, code)}", status, credentials)
    if any(part in text for part in _METADATA):
        return _final("no credentials were found", None, credentials)
    if status is None:
        kind = found[1] if (found := _KIND.search(text)) else ""
        return RequestFailedError(_FAILURES.get(kind, "the request failed"), temporary=True)
    if status in {301, 307, 308} or (status == 400 and "s3" in scheme):
        advice = _REGION
    problem = f"the store answered with an error{_in_brackets(status, code)}"
    return RequestFailedError(problem, temporary=status >= 500 or status in _TEMPORARY, status=status, advice=advice)


def _status_of(text: str) -> int | None:
    """Return the status of the answer that the text of an error reports, or None."""
    if "StartTooLarge" in text:  # of stores without a server
        return _OUTSIDE
    found = _STATUS.search(text)
    return int(found[1]) if found else None


def _final(problem: str, status: int | None, advice: str | None) -> RequestFailedError:
    return RequestFailedError(problem, temporary=False, status=status, advice=advice)


def _in_brackets(status: int | None, code: str) -> str:
    said: list[Any] = [each for each in (status, code) if each]
    return f" ({' '.join(map(str, said))})" if said else ""


def open_source(remote: Remote) -> Source:
    """Return the object at ``s3://``, ``gs://``, ``az://`` or ``abfs(s)://``, or at a path in a store of obstore.

    Raises:
        UnsupportedError: obstore is not installed, or the address or an option has a wrong form.
        MissingFileError: There is no such object, or the address names a bucket or ends with a slash.
        RemoteError: The store does not answer.
    """
    if remote.store is not None:
        return _source(StoredObject(remote.store, remote.url, root_of(remote.store)))
    address = parse_address(remote.url)
    if not address.key or address.key.endswith("/"):
        problem, path = "there are no objects with this prefix", shown(address.root, address.key)
        raise MissingFileError(problem, file=path, advice="Check the bucket and the prefix.")
    return _source(StoredObject(make_store(address, remote), address.key, address.root))


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
        return None if prefix and names_a_file(prefix) else _listed(store, prefix, root_of(store), lister=store)
    address = parse_address(remote.url)
    if address.key and names_a_file(address.key):
        return None
    store, lister = (make_store(address, remote, purpose) for purpose in ("read", "list"))
    try:
        return _listed(store, address.key, address.root, lister=lister)
    except RemoteError:
        if address.key and not address.key.endswith("/"):
            return None  # to read an object does not need the permission to list, and tells what else is wrong
        raise


def _source(remote: RemoteObject) -> RemoteFile:
    return RemoteFile(remote, access=remote_access(defaults.STORE_REQUESTS))


class StoredObject:
    """One object of a store; see ``RemoteObject``."""

    def __init__(self, store: Any, key: str, root: str) -> None:
        """Keep the client and the key.

        Args:
            store: A client of obstore.
            key: Key of the object.
            root: Address of the store without credentials, with a slash at the end.
        """
        self._store, self._key = store, key
        self.path = shown(root, key)

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

    def open_range(self, offset: int, nbytes: int, facts: ObjectFacts) -> PieceBody:
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
        """Do nothing: connections are closed with the client, when its last object is collected."""

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


def _listed(store: Any, key: str, root: str, *, lister: Any) -> RemoteDirectory | None:
    prefix = f"{key.strip('/')}/" if key.strip("/") else ""
    listing = _listing(lister, prefix, shown(root, prefix))
    names: dict[str, EntryKind] = {meta["path"].removeprefix(prefix): "file" for meta in listing["objects"]}
    names |= {path.rstrip("/").removeprefix(prefix): "directory" for path in listing["common_prefixes"]}
    # Some tools make an empty object with the name of the prefix.
    entries = tuple(RemoteEntry(name, kind) for name, kind in names.items() if name and "/" not in name)
    if not entries:
        return None
    opened = lambda name: _source(StoredObject(store, prefix + name, root))  # noqa: E731
    return RemoteDirectory(shown(root, prefix), lambda: entries, opened)


def _listing(lister: Any, prefix: str, path: str) -> Any:
    try:
        with _store_failures(path) as library:
            return library.list_with_delimiter(lister, prefix or None)
    except RequestFailedError as failure:
        raise RemoteError(failure.problem, file=path, advice=failure.advice) from None
