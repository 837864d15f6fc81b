"""A bounded cache of the open descriptors of all local files, which closes the least recently used first.

A descriptor is leased for one read. A leased descriptor is never closed: eviction skips it, and one that its owner
drops meanwhile is closed when the last reader returns it.

The bound is the smaller of ``OPEN_FILES`` and a quarter of the limit of the process. If the system still refuses
another descriptor, the cache shrinks to half permanently; if all of it is in use, the thread waits for a descriptor.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeAlias

from sluice._defaults import OPEN_FILES

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]  # the one name for both

__all__ = ["DESCRIPTORS", "Descriptor", "DescriptorCache", "Lease"]

#: A marker object of the file, compared by identity, and whether it is opened for direct I/O. Not the file itself: a
#: file that the cache keeps alive would never be closed by its finalizer.
Key: TypeAlias = "tuple[object, bool]"

_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE})

#: Divisor of the process limit that gives the bound: imports, pipes and /proc need descriptors as well.
_SHARE = 4

#: Seconds to wait for a descriptor if all are in use. A read of 8 MiB takes longer only on a hung network disk.
_PATIENCE_SECONDS = 60.0


class Descriptor:
    """One open descriptor, owned by the cache."""

    __slots__ = ("dropped", "leases", "number")

    def __init__(self, number: int) -> None:
        #: Number of the descriptor in the operating system.
        self.number = number
        #: Leases of the reads in progress.
        self.leases: set[Lease] = set()
        #: Whether its owner dropped it during a read.
        self.dropped = False


class Lease:
    """The right of one reader to a descriptor.

    It is created before the descriptor is taken, so that an interrupt at any step leaves the reader with a lease to
    return.
    """

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        #: The descriptor; None until it is found or opened.
        self.descriptor: Descriptor | None = None


class DescriptorCache:
    """Lends descriptors to reading threads; every method may be called from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: OrderedDict[Key, Descriptor] = OrderedDict()  # the least recently used first
        self._new_lock()
        self._forsaken: deque[Key] = deque()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_readers)

    def take(self, key: Key, open_file: Callable[[list[int]], None], lease: Lease) -> Descriptor:
        """Return the descriptor of ``key``, opened if necessary; it stays open until ``give_back``.

        Args:
            key: The file and the kind of access.
            lease: The lease, which the caller returns even if this raises.
            open_file: Opens the file and adds the descriptor to the list. Called without the lock, as network disks
                can be slow. Descriptors in the list are closed if anything is raised.

        Raises:
            OSError: ``open_file`` raised it; too many open files only if closing others did not help.
        """
        while True:
            with self._lock:
                self._drop_forsaken()
                found = self._open.get(key)
                if found is not None:
                    self._open.move_to_end(key)
                    return _lend(found, lease)
            opened: list[int] = []
            try:
                open_file(opened)
                return self._keep(key, opened, lease)
            except OSError as error:
                if error.errno not in _NONE_LEFT or not self._make_room():
                    raise
            finally:
                for number in opened:
                    os.close(number)

    def give_back(self, lease: Lease) -> None:
        """Return a lease after the read, or after an attempt to take a descriptor."""
        with self._lock:
            descriptor = lease.descriptor
            if descriptor is None or lease not in descriptor.leases:
                return
            descriptor.leases.remove(lease)
            if descriptor.leases:
                return
            if descriptor.dropped:
                os.close(descriptor.number)
            self._returned.notify()

    def drop(self, key: Key) -> None:
        """Close the descriptor of ``key``, if there is one: now, or when its last reader returns it."""
        with self._lock:
            self._drop(key)

    def forsake(self, key: Key) -> None:
        """Drop ``key`` now or at the next call of any other method; for finalizers.

        Finalizers run wherever the collector runs, possibly in this thread inside another method.
        """
        if key not in self._open:  # the owner has dropped it
            return
        self._forsaken.append(key)
        if not self._lock.locked():
            with self._lock:
                self._drop_forsaken()

    def _new_lock(self) -> None:
        # Entered directly: entering a condition runs Python code, in which an interrupt would leave the lock taken.
        self._lock = threading.Lock()  # not an RLock: a finalizer must not enter it a second time
        self._returned = threading.Condition(self._lock)

    def _drop(self, key: Key) -> None:
        found = self._open.pop(key, None)
        if found is None:
            return
        found.dropped = True
        if not found.leases:
            os.close(found.number)

    def _drop_forsaken(self) -> None:
        while self._forsaken:
            self._drop(self._forsaken.popleft())

    def _keep(self, key: Key, opened: list[int], lease: Lease) -> Descriptor:
        with self._lock:
            found = self._open.get(key)
            if found is None:  # else another thread opened it first
                found = self._open[key] = Descriptor(opened.pop())
            _lend(found, lease)
            self._close_idle(self._bound())
        return found

    def _bound(self) -> int:
        if resource is None:
            return self._limit
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return self._limit if allowed == resource.RLIM_INFINITY else max(1, min(self._limit, allowed // _SHARE))

    def _close_idle(self, most: int) -> None:
        """Close descriptors without readers, the least recently used first, until ``most`` are open."""
        idle = [key for key, descriptor in self._open.items() if not descriptor.leases]
        for key in idle[: max(0, len(self._open) - most)]:
            os.close(self._open.pop(key).number)

    def _make_room(self) -> bool:
        """Close half of the open descriptors, or wait for a reader; return False if neither frees a descriptor."""
        with self._lock:
            before = len(self._open)
            if not before:  # other code holds the descriptors: a smaller cache would not help
                return False
            self._limit = max(1, before // 2)
            self._close_idle(before // 2)
            if len(self._open) < before:
                return True
            return self._returned.wait(_PATIENCE_SECONDS)

    def _forget_readers(self) -> None:
        """Reset after a fork: the other threads, their reads and the lock they may hold do not exist in the child."""
        self._new_lock()
        for descriptor in self._open.values():
            descriptor.leases.clear()


def _lend(descriptor: Descriptor, lease: Lease) -> Descriptor:
    lease.descriptor = descriptor  # first: a lease that is counted must know what it is for
    descriptor.leases.add(lease)
    return descriptor


#: The cache of the process, whose limit on open files applies to all of its files together.
DESCRIPTORS = DescriptorCache(OPEN_FILES)
