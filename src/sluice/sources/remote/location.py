"""``sluice.Remote``: an address with headers and options; and the objects of fsspec that stand for an address."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from itertools import chain
from typing import Any

from sluice._errors import UnsupportedError
from sluice._messages import type_of
from sluice._public import public
from sluice._units import parse_bytes
from sluice.records import RequestRecord
from sluice.sources.remote_names import is_url, without_credentials

__all__ = ["Remote", "remote_location"]

#: Types of settings, and what to write.
_FORMS: dict[str, tuple[Any, str]] = {
    "headers": (Mapping, "a dict of texts"),
    "options": (Mapping, "a dict"),
    "verify": ((bool, str), "True, False or the path of certificates as text"),
    "cert": ((str, tuple), "a path, or two paths in a tuple, as texts"),
    "connections": (int, "a number from 1 on"),
    "timeout": ((int, float), "seconds"),
    "on_request": (Callable, "a function"),
}

#: Fields that a repr may show: the others can hold credentials.
_SHOWN = ("verify", "cert", "connections", "timeout", "cache", "cache_bytes")


@public()
@dataclass(frozen=True, slots=True, repr=False)
class Remote:
    """Address of a remote checkpoint, with headers, options and settings of requests.

    It is accepted wherever a path is; a URL alone is enough if the defaults suit. The repr shows no credentials.

    Example:
        >>> source = sluice.Remote("https://host/model.safetensors", headers={"Authorization": "Bearer ..."})
        >>> source
        Remote('https://host/model.safetensors', headers=...)
    """

    #: URL of a file or directory; with ``store``, the path in that store.
    url: str
    _: KW_ONLY
    #: Additional headers of each request, such as credentials; for ``http``, ``https`` and object stores.
    headers: Mapping[str, str] | None = field(default=None, hash=False)
    #: Whether certificates are checked, or the path of the certificates that are trusted.
    verify: bool | str = True
    #: Client certificate for servers of HTTP that ask for one: the path of a PEM file with its key, or two paths.
    cert: str | tuple[str, str] | None = None
    #: Requests for one file in flight at once; None for the default of the server's kind. A server that answers 429 or
    #: 503 gets fewer.
    connections: int | None = None
    #: Seconds without a byte after which a request counts as failed.
    timeout: float | None = None
    #: Options of the library that makes the requests: the configuration of an obstore store, or the storage options of
    #: an fsspec file system.
    options: Mapping[str, Any] | None = field(default=None, hash=False)
    #: Function that is called after each request, from any thread, with its ``method``, ``url`` without query,
    #: ``nbytes``, ``seconds`` and ``status``.
    on_request: Callable[[RequestRecord], object] | None = None
    #: A store of obstore or a file system of fsspec that holds ``url``.
    store: Any = field(default=None, hash=False)
    #: Directory that keeps the bytes that were read, by version of the object, so that a second load reads them there.
    cache: str | os.PathLike[str] | None = None
    #: Most bytes of this directory, in bytes or as text; the objects that were not used for longest are removed. The
    #: default is 50 GiB.
    cache_bytes: int | str | None = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            TypeError: An argument has a wrong type.
            ValueError: An argument has a wrong value, or contradicts ``store``.
        """
        if not isinstance(self.url, str):
            raise TypeError(f"url is {type_of(self.url)}; write a text such as 's3://bucket/model.safetensors'")
        if self.store is None and not is_url(self.url):
            raise ValueError(
                f"url: {self.url!r} is not a URL; a path needs no Remote, and a path in a store needs store="
            )
        if self.store is not None and not (_is_filesystem(self.store) or is_obstore(self.store)):
            raise TypeError(f"store is {type_of(self.store)}; pass a store of obstore or a file system of fsspec")
        self._check_settings()
        if self.connections is not None and (isinstance(self.connections, bool) or self.connections < 1):
            raise ValueError(f"connections={self.connections!r}: write a number from 1 on")
        if self.timeout is not None and not 0 < self.timeout < 2e6:  # sockets refuse more
            raise ValueError(f"timeout={self.timeout!r}: write seconds above 0, below 2,000,000")
        self._check_cache()

    def __repr__(self) -> str:
        """Return the address without credentials, and the names of the other arguments."""
        parts = [repr(self.address)]
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value != each.default:
                parts.append(f"{each.name}={value!r}" if each.name in _SHOWN else f"{each.name}=...")
        return f"Remote({', '.join(parts)})"

    @property
    def address(self) -> str:
        """The address for messages and reports, without credentials."""
        return without_credentials(self.url)

    def _check_settings(self) -> None:
        for name, (types, form) in _FORMS.items():
            given = getattr(self, name)
            if not isinstance(given, types) and (given is not None or name == "verify"):
                raise TypeError(f"{name} is {type_of(given)}; write {form}")
        for name, texts in (("headers", chain(*(self.headers or {}).items())), ("cert", self.cert or ())):
            if wrong := [type_of(each) for each in texts if not isinstance(each, str)]:  # may be passwords
                raise TypeError(f"{name} has {wrong[0]}; write {_FORMS[name][1]}")
        used = [name for name in ("headers", "options", "timeout", "cert") if getattr(self, name) is not None]
        used += ["verify"] if self.verify is not True else []
        if self.store is not None and used:
            raise ValueError(f"{used[0]}= has no effect with store=: the store was made with its own settings")

    def _check_cache(self) -> None:
        if self.cache is None:
            if self.cache_bytes is not None:
                raise ValueError("cache_bytes= has no effect without cache=")
            return
        if not isinstance(self.cache, (str, os.PathLike)) or not isinstance(os.fspath(self.cache), str):
            raise TypeError(f"cache is {type_of(self.cache)}; write the path of a directory")
        if not os.fspath(self.cache):
            raise ValueError("cache='': write the path of a directory")
        if self.cache_bytes is not None:
            parse_bytes(self.cache_bytes)


def remote_location(thing: object) -> Remote | None:
    """Return the remote address that an object stands for, or None.

    Besides ``Remote`` these are the objects of fsspec that have a file system and a path: ``OpenFile`` and its file
    objects, and the paths of universal_pathlib.

    Raises:
        UnsupportedError: The object decompresses what it reads.
    """
    if isinstance(thing, Remote):
        return thing
    filesystem, path = getattr(thing, "fs", None), getattr(thing, "path", None)
    if not isinstance(path, str) or not _is_filesystem(filesystem):
        return None
    if getattr(thing, "compression", None):
        raise UnsupportedError(
            "the file object decompresses what it reads", file=path, advice="Pass the bytes in a BytesIO."
        )
    return Remote(path, store=filesystem)


def is_obstore(store: object) -> bool:
    """Return whether an object is a store of obstore."""
    return any(each.__module__.partition(".")[0] in {"obstore", "_obstore"} for each in type(store).__mro__)


def _is_filesystem(store: object) -> bool:
    return all(hasattr(store, name) for name in ("cat_file", "info", "ls"))
