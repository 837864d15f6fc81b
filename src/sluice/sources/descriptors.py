"""The open descriptors of all local files: a bounded number, the least recently used closed first.

A descriptor is taken for the length of one read. One that somebody reads from is never closed: eviction passes it over,
and what its owner drops meanwhile is closed when the last reader gives it back.

The bound is the smaller of ``OPEN_FILES`` and a quarter of what the process may have open. Where the system still
refuses another descriptor, half of the cache is given up for good, and if all of it is in use the thread waits for one.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeAlias

from sluice._options import OPEN_FILES

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]  # the one name for both

__all__ = ["DESCRIPTORS", "Descriptor", "DescriptorCache", "Lease"]

#: A mark of the file, which compares by identity, and whether it was opened for direct I/O. Not the file itself: what
#: the cache keeps alive would never be closed by its finalizer.
Key: TypeAlias = "tuple[object, bool]"

_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE})

#: The cache takes at most this part of the process's limit: imports, pipes and /proc need descriptors as well.
_SHARE = 4

#: Seconds to wait for a descriptor when all are in use. One read of 8 MiB takes longer only on a dead network disk.
_PATIENCE_SECONDS = 60.0


class Descriptor:
    """One open descriptor; belongs to the cache."""

    __slots__ = ("dropped", "leases", "number")

    def __init__(self, number: int) -> None:
        #: What the operating system knows it by.
        self.number = number
        #: Those who read from it now.
        self.leases: set[Lease] = set()
        #: Whether its owner closed it while it was being read from.
        self.dropped = False


class Lease:
    """One reader's right to a descriptor.

    It is made before the descriptor is taken: an interrupt between any two steps of the taking leaves the reader with
    something to give back.
    """

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        #: What is lent; None until it was found or opened.
        self.descriptor: Descriptor | None = None


class DescriptorCache:
    """Lends descriptors to the threads that read; every method may be called from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: OrderedDict[Key, Descriptor] = OrderedDict()  # the least recently used first
        self._new_lock()
        self._forsaken: deque[Key] = deque()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_readers)

    def take(self, key: Key, open_file: Callable[[list[int]], None], lease: Lease) -> Descriptor:
        """Return the descriptor of ``key``, opened if need be; it stays open until ``give_back``.

        Args:
            key: What it belongs to.
            lease: To be given back, whatever this raises.
            open_file: Opens it and adds the descriptor to the list. Called without the lock, as a network disk can
                take its time. What is in the list is closed whatever is raised.

        Raises:
            OSError: Whatever ``open_file`` raises; too many open files only when closing others did not help.
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
        """Say that one reader has finished with what it took, or tried to take."""
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
        """Close the descriptor of ``key``, if there is one; while it is read from, when the last reader is done."""
        with self._lock:
            self._drop(key)

    def forsake(self, key: Key) -> None:
        """Do as ``drop`` does, now or at the next call of another method; for finalizers.

        They run wherever the collector does: maybe in this thread, inside of another method.
        """
        self._forsaken.append(key)
        if not self._lock.locked():
            with self._lock:
                self._drop_forsaken()

    def _new_lock(self) -> None:
        # Entered by itself: entering a condition is Python, and an interrupt in the midst of it keeps the lock taken.
        self._lock = threading.Lock()  # no RLock: a finalizer must not enter it a second time
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
            if found is None:  # otherwise another thread was faster
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
        """Close descriptors that nobody reads from, the least recently used first, until ``most`` are open."""
        idle = [key for key, descriptor in self._open.items() if not descriptor.leases]
        for key in idle[: max(0, len(self._open) - most)]:
            os.close(self._open.pop(key).number)

    def _make_room(self) -> bool:
        """Close half of what is open, or wait for a reader; return False when neither can free a descriptor."""
        with self._lock:
            before = len(self._open)
            if not before:  # the descriptors are other people's: a smaller cache would help nobody
                return False
            self._limit = max(1, before // 2)
            self._close_idle(before // 2)
            if len(self._open) < before:
                return True
            return self._returned.wait(_PATIENCE_SECONDS)

    def _forget_readers(self) -> None:
        """After a fork: the other threads do not exist here, neither do their reads nor the lock they may hold."""
        self._new_lock()
        for descriptor in self._open.values():
            descriptor.leases.clear()


def _lend(descriptor: Descriptor, lease: Lease) -> Descriptor:
    lease.descriptor = descriptor  # first: a lease that is counted must know what it is for
    descriptor.leases.add(lease)
    return descriptor


#: The one cache of the process: its limit on open files is one, too.
DESCRIPTORS = DescriptorCache(OPEN_FILES)
