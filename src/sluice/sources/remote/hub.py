"""Models of the Hugging Face Hub: tokens and the cache by huggingface_hub, its API and data over HTTP.

A branch or tag is resolved to its commit once, when an address is opened, and all files are those of this commit. Files
of the commit that are in the local cache of huggingface_hub are read there. Only without a connection, or with
``HF_HUB_OFFLINE``, the cached commit of the revision is used, which may be an older one; the report has a note.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote, unquote

import huggingface_hub
import msgspec
from huggingface_hub import constants, errors
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, but not in its stubs
from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import MissingFileError, RemoteError, UnsupportedError
from sluice.sources.directory import EntryKind
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source
from sluice.sources.remote import http
from sluice.sources.remote.directory import RemoteDirectory, RemoteEntry
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.http_responses import ResponseHead, check_status
from sluice.sources.remote.location import Remote
from sluice.sources.remote.protocol import RequestFailedError
from sluice.sources.remote.retries import Attempts, server_of, wait

__all__ = ["HubAddress", "open_commit", "open_directory", "open_place", "open_source", "parse_address"]

#: Most bytes of what the hub says about a model: names of 500,000 files.
_MOST_INFORMATION_BYTES = 64 << 20

_LOGIN = "A private or gated model needs a token: `hf auth login`, or the variable HF_TOKEN."

_FORM = "hf://OWNER/NAME[@REVISION][/PATH]"

#: Suffixes that tell a file from the name of a model: ``hf://gpt2/model.safetensors`` has no owner.
_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json", ".h5", ".gguf", ".msgpack", ".txt")

#: Revisions with a slash in their names that are common: pull requests and converted files.
_SLASHED = re.compile(r"(refs/(?:pr|convert)/[^/]+)(?:/|$)")

#: Held while a revision is resolved that several files share.
_resolving = threading.Lock()


class HubAddress(Struct, frozen=True, kw_only=True):
    """Parts of an address of the hub."""

    #: Owner and name, or only the name.
    repository: str
    #: Branch, tag or commit.
    revision: str
    #: File or directory in the repository; empty for all of it.
    path: str

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf://{self.repository}{revision}" + (f"/{self.path}" if self.path else "")


def parse_address(url: str) -> HubAddress:
    """Return the parts of an ``hf://`` URL.

    Raises:
        UnsupportedError: It names a dataset or a space.
        RemoteError: It does not have the form of an address.
    """
    rest = url.partition("://")[2].strip("/").removeprefix("models/")
    if rest.startswith(("datasets/", "spaces/")):
        problem = "only models of the hub are checkpoints, not datasets and spaces"
        raise UnsupportedError(problem, file=url, advice="Download the file and pass its path.")
    parts = rest.split("/")
    alone = "@" in parts[0] or len(parts) == 1 or (len(parts) == 2 and parts[1].endswith(_FILES))
    count = 1 if alone else 2
    name, at, revision = "/".join(parts[:count]).partition("@")
    path = "/".join(parts[count:])
    slashed = _SLASHED.match(f"{revision}/{path}") if at else None
    if slashed:
        revision, path = slashed[1], f"{revision}/{path}"[slashed.end() :]
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII) or (at and not revision):
        raise RemoteError(
            "the address does not name a model of the hub", file=url, expected=_FORM, advice=f"Write {_FORM}."
        )
    return HubAddress(repository=name, revision=unquote(revision) or "main", path=path)


def open_source(remote: Remote, commits: dict[Any, Any] | None = None) -> Source:
    """Return a file of the hub, or of the local cache.

    Args:
        remote: Its address.
        commits: Revisions that other files of the same checkpoint have resolved; this one is added.

    Raises:
        MissingFileError: There is no such model, revision or file.
        RemoteError: The hub refuses or does not answer, and the file is not in the cache.
    """
    address = parse_address(remote.url)
    if commits is None:
        return _Commit.of(address, remote).open(address.path)
    key = (address.repository, address.revision, tuple((remote.headers or {}).items()))
    with _resolving:
        if key not in commits:
            commits[key] = _Commit.of(address, remote)
    commit: _Commit = commits[key]
    return commit.open(address.path)


def open_commit(remote: Remote) -> tuple[str, RemoteDirectory]:
    """Return a model, and its address at the commit that its revision has now; raises as ``open_source``."""
    address = parse_address(remote.url)
    commit = _Commit.of(address, remote)
    directory = commit.directory()
    if directory is None:
        raise MissingFileError("the model has no files", file=str(address))
    return str(replace(address, revision=commit.revision)), directory


def open_directory(remote: Remote) -> RemoteDirectory | None:
    """Return a model or a directory in it; None if the address names a file, or nothing; raises as ``open_source``."""
    address = parse_address(remote.url)
    return None if address.path.endswith(_FILES) else _Commit.of(address, remote).directory()


def open_place(remote: Remote) -> RemoteDirectory | Source:
    """Return a model, a directory in it or a file, all of one commit; raises as ``open_source``."""
    address = parse_address(remote.url)
    commit = _Commit.of(address, remote)
    return commit.directory() or commit.open(address.path)


class _File(Struct):
    rfilename: str


class _Information(Struct):
    """Answer of the hub about a revision of a model, as far as it is used."""

    sha: str | None = None
    siblings: list[_File] | None = None


_INFORMATION = msgspec.json.Decoder(_Information)  # made when this is imported: see formats.strict_json


class _Commit(Struct, frozen=True, eq=False):
    """One commit of a model."""

    #: The address that named it.
    address: HubAddress
    #: Settings of requests.
    remote: Remote
    #: The commit.
    revision: str
    #: Paths of its files.
    names: Sequence[str]
    #: Directory of these files in the cache, and why the hub is not asked, as a clause; None if they are on the hub,
    #: and perhaps in the cache too.
    cached: tuple[str, str] | None

    @classmethod
    def of(cls, address: HubAddress, remote: Remote) -> _Commit:
        """Resolve the revision of an address.

        Raises:
            MissingFileError: There is no such model or revision.
            RemoteError: The hub refuses or does not answer, or it cannot be reached and the revision is not cached.
        """
        if constants.HF_HUB_OFFLINE:
            return cls._from_cache(address, remote, "HF_HUB_OFFLINE is set", None)
        try:
            info = _model_info(address, remote)
        except RemoteError as error:
            failure = error.__cause__
            if not (isinstance(failure, RequestFailedError) and failure.unreached):
                raise
            return cls._from_cache(address, remote, failure.problem, error)
        names = [each.rfilename for each in info.siblings or ()]
        return cls(address, remote, info.sha or address.revision, names, None)

    @classmethod
    def _from_cache(cls, address: HubAddress, remote: Remote, why: str, cause: Exception | None) -> _Commit:
        try:
            folder = huggingface_hub.snapshot_download(
                address.repository, revision=address.revision, local_files_only=True
            )
        except (errors.LocalEntryNotFoundError, OSError, ValueError):
            problem = f"the cache of huggingface_hub does not have the model, and the hub is not asked: {why}"
            raise RemoteError(problem, file=str(address), advice="Check the connection.") from cause
        found = (os.path.join(where, name) for where, _, files in os.walk(folder) for name in files)
        names = [os.path.relpath(path, folder).replace(os.sep, "/") for path in found]
        return cls(address, remote, os.path.basename(folder), names, (folder, why))

    def directory(self) -> RemoteDirectory | None:
        """Return the directory at the address; None if that is a file, or nothing."""
        prefix = f"{self.address.path}/" if self.address.path else ""
        kinds: dict[str, EntryKind] = {}
        for name in self.names:
            if name.startswith(prefix):
                first, slash, _ = name.removeprefix(prefix).partition("/")
                kinds[first] = "directory" if slash else "file"
        entries = tuple(RemoteEntry(name, kind) for name, kind in kinds.items())
        path = str(self.address)
        return RemoteDirectory(path, lambda: entries, lambda name: self.open(prefix + name)) if entries else None

    def open(self, path: str) -> Source:
        """Return a file.

        Raises:
            MissingFileError: There is no such file.
        """
        shown = str(replace(self.address, path=path))
        if self.cached is not None:
            folder, why = self.cached
            if path in self.names:
                note = f"commit {self.revision[:12]} in the cache of huggingface_hub: {why}"
                return LocalFile(os.path.join(folder, path), note=note)
            problem = f"the file is not in the cache of huggingface_hub, and the hub is not asked: {why}"
            raise RemoteError(problem, file=shown, advice="Check the connection, or download the whole model.")
        if path not in self.names:
            close = get_close_matches(path, self.names, n=1)
            advice = f"Did you mean {close[0]!r}?" if close else "Check the name of the file."
            raise MissingFileError("the model has no such file", file=shown, advice=advice) from FileNotFoundError(path)
        cached = huggingface_hub.try_to_load_from_cache(self.address.repository, path, revision=self.revision)
        if isinstance(cached, str):
            return LocalFile(cached, note="read from the cache of huggingface_hub")
        url = huggingface_hub.hf_hub_url(self.address.repository, path, revision=self.revision, endpoint=_endpoint())
        return RemoteFile(http.HttpObject(_with_token(url, self.remote), shown=shown))


def _endpoint() -> str:
    """Return the address of the hub; huggingface_hub reads the variable only when it is imported."""
    return os.environ.get("HF_ENDPOINT") or constants.ENDPOINT


def _with_token(url: str, remote: Remote) -> Remote:
    """Return a URL of the hub with a token, unless there is one or huggingface_hub is told to send none."""
    headers = dict(remote.headers or {})
    if not any(name.lower() == "authorization" for name in headers):
        headers |= {name: value for name, value in build_hf_headers().items() if name.lower() == "authorization"}
    return dataclasses.replace(remote, url=url, headers=headers)


def _model_info(address: HubAddress, remote: Remote) -> _Information:
    """Return what the hub says about a revision of a model, asked as often as for a file.

    Raises:
        MissingFileError: There is no such model or revision.
        RemoteError: The hub refuses or does not answer.
    """
    url = f"{_endpoint()}/api/models/{address.repository}/revision/{quote(address.revision, safe='')}"
    hub = http.HttpObject(_with_token(url, remote), shown=str(address))
    attempts = Attempts(str(address), None, sleep=wait, clock=time.monotonic, server=server_of(url))
    try:
        return attempts.repeat(lambda: _information(address, *hub.document(_MOST_INFORMATION_BYTES)))
    finally:
        hub.close()


def _information(address: HubAddress, answer: ResponseHead, body: bytes) -> _Information:
    code, shown = answer.headers.get("X-Error-Code"), str(address)
    if code == "GatedRepo":
        problem = "access to the model needs the permission of its owner"
        raise RemoteError(problem, file=shown, advice=_LOGIN)
    if code == "RevisionNotFound":
        problem = f"the model has no revision {address.revision!r}"
        raise MissingFileError(problem, file=shown, advice="Check the revision.")
    # Without a token, the hub answers 401 for models that do not exist.
    hidden = answer.status == 401 and "invalid credentials" not in answer.headers.get("X-Error-Message", "").lower()
    if code == "RepoNotFound" or hidden:
        problem = "the hub has no such model, or it is private"
        raise MissingFileError(problem, file=shown, advice=f"Check the name. {_LOGIN}")
    if answer.status in {401, 403}:
        problem = f"the hub refuses the request with status {answer.status}"
        raise RemoteError(problem, file=shown, advice=_LOGIN)
    check_status(answer)
    try:
        return _INFORMATION.decode(body)
    except msgspec.DecodeError as error:
        problem = "the answer of the hub is not JSON of a model"
        raise RemoteError(problem, file=shown, advice="Check HF_ENDPOINT and proxies.") from error
