"""The one place where the address of a remote file or directory meets the library that reads it.

Each scheme has a transport, a module of this package that is imported when an address needs it:

- ``open_source(remote)`` returns the file at an address;
- ``open_directory(remote)`` returns the directory at an address, or None if it names one object;
- ``open_place(remote)``, if it has that, returns either for fewer requests than both.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any, cast

from msgspec.structs import replace

from sluice._errors import MissingFileError, RemoteError, UnsupportedError
from sluice.sources.directory import Directory
from sluice.sources.protocol import Source
from sluice.sources.remote.directory import RemoteDirectory, SiblingFiles, below
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.location import Remote, is_obstore, remote_location
from sluice.sources.remote_names import is_chained

__all__ = [
    "below",
    "open_commit",
    "open_remote",
    "open_remote_directory",
    "open_remote_place",
    "remote_location",
    "remote_parent",
]

#: Transport of each scheme; fsspec has all others.
_TRANSPORTS = {
    "http": "http",
    "https": "http",
    **dict.fromkeys(("s3", "s3a", "gs", "az", "azure", "abfs", "abfss"), "stores"),
    "hf": "hub",
}

#: Extra that brings the library of a transport, and the library.
_EXTRAS = {
    "http": ("remote", "urllib3"),
    "stores": ("remote", "obstore"),
    "hub": ("hub", "huggingface_hub"),
    "fsspec_files": ("remote", "fsspec"),
}


def open_remote(remote: Remote, commits: dict[Any, Any] | None = None) -> Source:
    """Return a remote file as a source; its first bytes are read.

    Args:
        remote: Its address.
        commits: Revisions of the hub, which all files of one checkpoint that are opened with this dict share.

    Raises:
        MissingFileError: There is no such file.
        UnsupportedError: A library is missing, or no library reads addresses of this kind.
        RemoteError: The server does not answer.
    """
    shared = () if commits is None or _transport(remote) != "hub" else (commits,)
    return _tuned(_module(remote).open_source(remote, *shared), remote)


def open_commit(url: str) -> tuple[str, Directory]:
    """Return the URL of a model of the hub at the commit that its revision has now, and its files; raises as above."""
    remote = Remote(url)
    return cast("tuple[str, Directory]", _module(remote).open_commit(remote))


def open_remote_directory(remote: Remote) -> Directory | None:
    """Return a remote directory; None if the address names one file, or nothing.

    Raises:
        UnsupportedError: A library is missing, or no library reads addresses of this kind.
        RemoteError: The server does not answer.
    """
    return _tuned_directory(_module(remote).open_directory(remote), remote)


def open_remote_place(remote: Remote) -> Directory | Source:
    """Return the remote directory or the remote file at an address.

    Raises:
        MissingFileError: There is neither.
        UnsupportedError: A library is missing, or no library reads addresses of this kind.
        RemoteError: The server does not answer.
    """
    transport = _module(remote)
    if not hasattr(transport, "open_place"):
        return open_remote_directory(remote) or open_remote(remote)
    place: RemoteDirectory | Source = transport.open_place(remote)
    if isinstance(place, RemoteDirectory):
        return cast("Directory", _tuned_directory(place, remote))
    return _tuned(place, remote)


def _tuned_directory(directory: RemoteDirectory | None, remote: Remote) -> Directory | None:
    if directory is None and _transport(remote) == "http" and remote.address.endswith("/"):
        return SiblingFiles(remote, open_remote)
    return directory and directory.tuned(lambda source, name: _tuned(source, below(remote, name)))


def remote_parent(remote: Remote) -> Directory:
    """Return the directory that holds a remote file.

    The address of the directory is that of the file up to its last part: same server, same query.

    Raises:
        UnsupportedError: A library is missing.
    """
    parent = SiblingFiles(remote, open_remote)
    transport = _transport(remote)
    # One client, or one revision, for all files. The revision is that of all files or of none; an object of a store may
    # be read without the permission to list.
    with suppress(*((RemoteError, MissingFileError) if transport == "stores" else ())):
        if transport in ("stores", "hub"):
            return open_remote_directory(parent.location) or parent
    return parent


def _tuned(source: Source, remote: Remote) -> Source:
    if not isinstance(source, RemoteFile):
        return source  # a local file already, such as one of the cache of huggingface_hub
    if remote.connections is not None:
        source.access = replace(source.access, parallel_requests=remote.connections)
    if remote.on_request is not None:
        source.observe(remote.on_request)
    if remote.cache is None:
        return source
    # Here, not above: most addresses have no cache.
    from sluice.sources.remote.caching import cached_source

    return cached_source(source, remote)


def _transport(remote: Remote) -> str:
    """Return the name of the module that reads an address."""
    if remote.store is not None:
        return "stores" if is_obstore(remote.store) else "fsspec_files"
    if is_chained(remote.url):
        return "fsspec_files"
    return _TRANSPORTS.get(remote.url.partition("://")[0].lower(), "fsspec_files")


def _module(remote: Remote) -> Any:
    """Import the transport of an address.

    Raises:
        UnsupportedError: Its library is not installed.
    """
    transport = _transport(remote)
    extra, library = _EXTRAS[transport]
    try:
        return import_module(f"sluice.sources.remote.{transport}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        problem = f"remote files of this kind need the library {library}, which is not installed"
        advice = f"pip install 'sluice[{extra}]'"
        raise UnsupportedError(problem, file=remote.address, advice=advice) from error
