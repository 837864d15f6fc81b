"""A bounded cache of the open descriptors of all local files, which closes the least recently used first.

A descriptor closes when its last reference goes: the cache drops its own, a reader the one for its read. Descriptors
are opened and closed by single calls into C, where no interrupt can separate them from the object that owns them.

The bound is the smaller of ``OPEN_FILES`` and a quarter of the limit of the process. If the system still refuses
another descriptor, the cache shrinks to half permanently; if all of it is in use, the thread waits for a descriptor.

There is no lock: each step is one call of a dictionary, which is atomic.
"""

from __future__ import annotations

import errno
import io
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias
from weakref import WeakSet

from sluice._defaults import OPEN_FILES

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]  # the one name for both

__all__ = ["DESCRIPTORS", "DescriptorCache", "OwnedFile", "bounded"]

#: A marker object of the file, compared by identity, and whether it is opened for direct I/O. Not the file itself: a
#: file that the cache keeps alive would never be closed by its finalizer.
Key: TypeAlias = "tuple[object, bool]"

_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE})

#: Divisor of the process limit that gives the bound: imports, pipes and /proc need descriptors as well.
_SHARE = 4

#: Seconds to wait for a descriptor if all are in use. A read of 8 MiB takes longer only on a hung network disk.
_PATIENCE_SECONDS = 60.0

#: Seconds between attempts meanwhile.
_PAUSE_SECONDS = 0.01


class OwnedFile(io.FileIO):
    """An open descriptor, closed with its last reference."""

    __del__ = io.FileIO.close  # the destructor of the base class would call it a leak

    @classmethod
    def open(cls, path: str, flags: int = 0) -> OwnedFile:
        """Open a file for reading; ``flags`` are added to the usual ones. A new file is private."""
        for name in ("O_CLOEXEC", "O_BINARY", "O_NONBLOCK"):
            flags |= getattr(os, name, 0)
        opener = partial(os.open, mode=0o600) if flags & os.O_CREAT else os.open
        return next(map(cls, map(opener, (path,), (os.O_RDONLY | flags,))))  # one step: see above


def bounded(limit: int, share: int) -> int:
    """Return a number of descriptors, or a share of those that the process may have if that is less."""
    if resource is None:
        return limit
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if allowed == resource.RLIM_INFINITY else max(1, min(limit, allowed // share))


class DescriptorCache:
    """Lends descriptors to reading threads; every method may be called from any thread and any finalizer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: OrderedDict[Key, OwnedFile] = OrderedDict()  # the least recently used first
        self._in_use: WeakSet[OwnedFile] = WeakSet()  # and the cached ones

    def take(self, key: Key, open_file: Callable[[], OwnedFile]) -> OwnedFile:
        """Return the open file of ``key``, opened if necessary; it stays open as long as the caller refers to it.

        Raises:
            OSError: ``open_file`` raised it; too many open files only if closing others did not help.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            found = self._open.get(key)
            if found is not None:
                with suppress(KeyError):  # dropped meanwhile
                    self._open.move_to_end(key)
                return found
            try:
                found = self._open.setdefault(key, open_file())  # unless another thread opened it first
            except OSError as error:
                if error.errno not in _NONE_LEFT or not self._make_room(deadline):
                    raise
                continue
            self._in_use.add(found)
            if len(self._open) > 1:  # one is always allowed
                self._shrink(bounded(self._limit, _SHARE))
            return found

    def drop(self, key: Key) -> None:
        """Close the descriptor of ``key``, if there is one: now, or after its last read."""
        self._open.pop(key, None)

    def _shrink(self, most: int) -> None:
        with suppress(KeyError):  # emptied by another thread
            while len(self._open) > most:
                self._open.popitem(last=False)

    def _make_room(self, deadline: float) -> bool:
        """Drop half of the cache, or wait for a reader; return False if neither can free a descriptor."""
        if cached := len(self._open):
            self._limit = max(1, cached // 2)
            self._shrink(cached // 2)
            return True
        if not self._in_use or time.monotonic() > deadline:  # other code holds the descriptors
            return False
        time.sleep(_PAUSE_SECONDS)
        return True


#: The cache of the process, whose limit on open files applies to all of its files together.
DESCRIPTORS = DescriptorCache(OPEN_FILES)
