"""Addresses as text: their form, their credentials, and advice on names at which there is no checkpoint.

Nothing is looked up on the network.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import islice

__all__ = [
    "download_advice",
    "is_chained",
    "is_url",
    "missing_advice",
    "names_a_file",
    "path_of_file_url",
    "without_credentials",
]

#: A scheme has at least two characters: one is the drive of a Windows path.
_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+://")

#: Between the links of a chained URL of fsspec: ``zip://model.pth::https://host/model.zip``.
_LINK = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]+://)")

#: Host with a colon and what is not a port: the beginning of user and password.
_PASSWORD = re.compile(r"^[^@\[]*:(?!\d{0,5}$)[^@]*$")

#: Schemes whose addresses have no user: ``hf://model@revision`` and ``az://container@account``.
_WITHOUT_CREDENTIALS = frozenset({"hf", "az", "azure", "abfs", "abfss"})

_DOWNLOAD = "Download the checkpoint first and pass its local path."

#: A URL that went through ``pathlib.Path``.
_COLLAPSED_URL = re.compile(r"(?:https?|s3|gs|az|abfss?|hf|memory|ftp|sftp):/[^/]")

#: Page or file of a model on the hub, and the scheme of its file system.
_HUB_URL = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/|api/)|hf://(?:models/)?)"
    r"(?P<repository>[\w.-]+(?:/(?!(?:resolve|blob|tree|raw)/)[\w.-]+)?)(?:/(?:resolve|blob|tree|raw)/[^/]+)?/?(?P<file>[^?#]*)"
)

#: Identifier of a repository: a name, or an organization and a name. Paths of files have a suffix.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w-]*")

#: Suffixes of files: with one of these, a name is neither a directory nor an identifier of the hub.
_FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".json", ".index", ".tar", ".zip", ".gz", ".gguf")

#: Most names of a directory that are compared with a misspelled one.
_COMPARED = 1000


def is_url(path: str) -> bool:
    """Return whether a text has the form of a URL."""
    return _URL.match(path) is not None


def is_chained(url: str) -> bool:
    """Return whether a text is several URLs of fsspec in one, such as ``simplecache::s3://bucket/key``."""
    return _LINK.search(re.split("[?#]", url, maxsplit=1)[0]) is not None


def names_a_file(path: str) -> bool:
    """Return whether the last part has a suffix of files, not of directories."""
    return path.endswith(_FILE_SUFFIXES)


def without_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment; of a chained one, all its links."""
    return "::".join(map(_plain, _LINK.split(url)))


def _plain(url: str) -> str:
    if not is_url(url):
        return url
    scheme, _, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    password = ":" in authority.rpartition("@")[0]
    if _PASSWORD.search(authority):  # the rest of a password with a character that should have been escaped
        authority, rest = "", rest.rpartition("@")[2] if "@" in rest else rest
    if scheme.lower() not in _WITHOUT_CREDENTIALS or ":" in authority:
        rest = authority.rpartition("@")[2] + rest[len(authority) :]
    rest = re.split("[?#]", rest, maxsplit=1)[0]
    # What is in front of a further @ may belong to the password.
    return f"{scheme}://{rest.rpartition('@')[2] if password else rest}"


def download_advice(url: str) -> str:
    """Return how to get a local copy of what a URL names."""
    plain = without_credentials(url)
    hub = _HUB_URL.match(plain)
    if hub is not None and hub["file"]:
        return f"{_DOWNLOAD} huggingface_hub.hf_hub_download({hub['repository']!r}, {hub['file']!r}) returns it."
    if hub is not None:
        return f"{_DOWNLOAD} {_snapshot(hub['repository'])}"
    if plain.startswith("file://"):
        return f"{_DOWNLOAD} A local file needs no URL: {path_of_file_url(plain)!r}."
    return _DOWNLOAD


def path_of_file_url(url: str) -> str:
    """Return the path of a ``file`` URL."""
    # Here, not above: it takes longer to import than this module.
    from urllib.parse import unquote

    return unquote("/" + url.partition("://")[2].partition("/")[2])


def missing_advice(path: str, *, checkpoint: bool = True) -> str:
    """Return what to check about a path at which there is nothing.

    Args:
        path: The path.
        checkpoint: Whether it should be that of a checkpoint, which the hub may have.
    """
    if is_url(path):
        return "Check the address."
    if _COLLAPSED_URL.match(path):
        return "It looks like a URL without a slash: pass URLs as str, because pathlib.Path changes them."
    may_be_on_hub = checkpoint and _HUB_ID.fullmatch(path) is not None
    parent, name = os.path.split(path)
    if any(letter in name for letter in "*?[") and (found := _matches(path)):
        return f"It is a pattern, which {found} match: pass a list, sorted(glob.glob({path!r}))."
    if parent and not os.path.isdir(parent):
        if may_be_on_hub and not name.endswith(_FILE_SUFFIXES):
            return f"If it names a model of the Hugging Face Hub: {_snapshot(path)}"
        return f"There is no directory {parent!r}."
    if (close := _closest(parent or ".", name)) is not None:
        return f"Did you mean {os.path.join(parent, close)!r}?"
    if not parent and may_be_on_hub:
        return f"If it names a model of the Hugging Face Hub: {_snapshot(path)}"
    if os.path.isabs(path):
        return "Check the path."
    with suppress(OSError):
        return f"Check the path; the current directory is {os.getcwd()!r}."
    return "Check the path; the current directory was removed."


def _snapshot(repository: str) -> str:
    return f"huggingface_hub.snapshot_download({repository!r}) downloads it and returns its directory."


def _matches(pattern: str) -> str:
    import glob

    count = sum(1 for _ in islice(glob.iglob(pattern), _COMPARED))
    return f"{count} names" if count else ""


def _closest(directory: str, name: str) -> str | None:
    """Return the most similar name in a directory, or None."""
    from difflib import get_close_matches

    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in islice(entries, _COMPARED)]
    except OSError:
        return None
    close = get_close_matches(name, names, n=1, cutoff=0.7)
    return close[0] if close else None
