"""Where a model is: a local directory, or one commit of a model of the hub, whose configuration is copied."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import quote

from msgspec import Struct

from sluice._arguments import path_argument
from sluice._errors import LimitError, MissingFileError, SluiceError
from sluice._options import Limits
from sluice.sources.directory import Directory
from sluice.sources.remote_names import names_a_file

__all__ = ["FoundModel", "find_model"]

#: Names that transformers looks for on the hub: a model, or an owner and a model.
_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

#: Files of a model that transformers reads besides its weights.
_CONFIGURATION = ("config.json", "generation_config.json", "adapter_config.json")


class FoundModel(Struct, frozen=True, kw_only=True):
    """Where the files of one model are."""

    #: Local directory with its configuration.
    folder: str
    #: Name that the caller passed.
    name: str
    #: Directory of its weights, or their URL at one commit.
    weights: str
    #: Names of all files, of a model of the hub.
    names: frozenset[str] = frozenset()


@contextmanager
def find_model(directory: object, revision: str | None, limits: Limits | None) -> Iterator[FoundModel]:
    """Find a model; a local directory wins over a model of the hub with its name.

    Raises:
        UnsupportedError: huggingface_hub is not installed.
        MissingFileError: The hub has no such model or revision, or that has no ``config.json``.
        RemoteError: The hub refuses or does not answer, and the model is not in its cache.
        ValueError: A local directory has a revision.
    """
    path = path_argument(directory, "directory")
    if os.path.lexists(path) or not _ID.fullmatch(path) or names_a_file(path):
        if revision is not None:
            raise ValueError(f"revision={revision!r} has no effect: {path!r} does not name a model of the hub")
        yield FoundModel(folder=path, name=path, weights=path)
        return
    from sluice.sources.remote.opening import open_commit  # here, not above: local models do without

    weights, commit = open_commit(f"hf://{path}" + ("" if revision is None else f"@{quote(revision, safe='')}"))
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        names = _copy(commit, folder, (limits or Limits()).header_bytes)
        try:
            yield FoundModel(folder=folder, name=path, weights=weights, names=names)
        except SluiceError as error:
            if str(error.file or "").startswith(folder):
                error.file = weights + str(error.file)[len(folder) :]
            raise


def _copy(commit: Directory, folder: str, limit_bytes: int) -> frozenset[str]:
    """Copy the configuration; return the names of all files."""
    names = frozenset(entry.name for entry in commit.entries() if entry.kind == "file")
    for name in names.intersection(_CONFIGURATION):
        with closing(commit.open(name)) as source, open(os.path.join(folder, name), "wb") as file:
            nbytes = source.identity.nbytes
            if nbytes > limit_bytes:
                raise LimitError(f"{name} is too large", file=source.path, expected=limit_bytes, found=nbytes)
            file.write(source.read_at(0, nbytes))
    if not os.listdir(folder):
        raise MissingFileError("the model has no config.json", file=commit.path)
    return names
