"""Remote directories of all transports, and files next to a file of a server that lists nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from urllib.parse import quote

from msgspec import Struct

from sluice._errors import MissingFileError, PathEscapeError, RemoteError, UnsupportedError
from sluice.sources.directory import DirectoryEntry, EntryKind
from sluice.sources.protocol import Source
from sluice.sources.remote.location import Remote
from sluice.sources.remote_names import is_chained, is_url

#: Files that tell of the others of a checkpoint, in the order in which they are tried.
_USUAL_NAMES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    ".metadata",
    "latest",
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "adapter_model.safetensors",
    "adapter_model.bin",
)

__all__ = ["RemoteDirectory", "RemoteEntry", "SiblingFiles", "below", "check_relative"]


def check_relative(name: str, directory: str) -> None:
    """Check that a name leads to a place below its directory, whichever server interprets it.

    Raises:
        PathEscapeError: It is absolute, a URL, or has an empty part, ``.`` or ``..``.
    """
    if "\\" in name or is_url(name) or {"", ".", ".."} & set(name.split("/")):
        problem = "the name leads out of the remote directory"
        raise PathEscapeError(problem, file=directory, expected="a relative name with forward slashes", found=name)


def below(remote: Remote, name: str) -> Remote:
    """Return the address of a file in a remote directory."""
    before, query = _divided(remote)
    text = quote(name) if _has_query(remote) else name
    slash = "/" if before and not before.endswith("/") else ""
    return dataclasses.replace(remote, url=f"{before}{slash}{text}{query}")


class RemoteEntry(Struct, frozen=True):
    """One name in a listing; see ``DirectoryEntry``."""

    name: str
    kind: EntryKind


class RemoteDirectory:
    """A directory of a server; see ``Directory``."""

    def __init__(
        self, path: str, entries: Callable[[], Iterable[DirectoryEntry]], opened: Callable[[str], Source]
    ) -> None:
        """Keep how it is listed, and how a file is opened by its name.

        Args:
            path: Address without credentials.
            entries: Lists the directory.
            opened: Opens a file; it gets names that do not lead out of the directory.
        """
        self.path, self._entries, self._opened = path, entries, opened

    def entries(self) -> Iterator[DirectoryEntry]:
        return iter(self._entries())

    def open(self, name: str) -> Source:
        check_relative(name, self.path)
        return self._opened(name)

    def check_inside(self, name: str) -> None:
        check_relative(name, self.path)

    def tuned(self, tune: Callable[[Source, str], Source]) -> RemoteDirectory:
        """Return the same directory with a function that each file and its name pass through."""
        return RemoteDirectory(self.path, self._entries, lambda name: tune(self._opened(name), name))


class SiblingFiles(RemoteDirectory):
    """The files next to a remote file, which can be opened by name but not listed; see ``Directory``.

    Its only entry is the first of the usual names of a checkpoint's main file that the server has.
    """

    def __init__(self, remote: Remote, opened: Callable[[Remote], Source]) -> None:
        """Divide an address into directory and name.

        Args:
            remote: The file.
            opened: Opens a file of the same server.
        """
        #: The file that ``entries`` has found, until it is opened: its first bytes were received.
        self._found: dict[str, Source] = {}
        self._file = remote
        before, query = _divided(remote)
        parent, slash, _ = before.rpartition("/")
        self.name = remote.address.rpartition("/")[2]
        #: The directory itself.
        self.location = dataclasses.replace(remote, url=parent + slash + query)
        super().__init__(self.location.address, self._usual, self._next)
        self._open_location = opened

    def _usual(self) -> Iterator[DirectoryEntry]:
        refusals = []
        for name in _USUAL_NAMES:
            try:
                self._found[name] = self.open(name)
                yield RemoteEntry(name, "file")
                return
            except MissingFileError:
                pass
            except RemoteError as error:
                if getattr(error.__cause__, "status", None) != HTTPStatus.FORBIDDEN:
                    raise
                refusals.append(error)  # S3 also answers so if there is no such object, to who may not list
        if refusals:
            raise refusals[0]
        problem = f"the server has no listing of files, and there is none of {', '.join(_USUAL_NAMES)}"
        raise UnsupportedError(problem, file=self.path, advice="Pass the URL of a file or of the index of shards.")

    def _next(self, name: str) -> Source:
        found = self._found.pop(name, None)
        where = self._file if name == self.name else below(self.location, name)  # its name is encoded already
        return self._open_location(where) if found is None else found


def _divided(remote: Remote) -> tuple[str, str]:
    """Return the address of a file or directory up to the query, and the query with its mark."""
    if not _has_query(remote):
        return remote.url, ""
    before, mark, query = remote.url.partition("#")[0].partition("?")
    return before, mark + query


def _has_query(remote: Remote) -> bool:
    """Return whether the address is percent-encoded and may have a query: that of HTTP, not the key of a store."""
    return (
        remote.store is None and remote.url.lower().startswith(("http://", "https://")) and not is_chained(remote.url)
    )
