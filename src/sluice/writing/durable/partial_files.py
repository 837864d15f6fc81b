"""Partial files: their hidden names, the locks of live writers, and removal of the leftovers of dead ones.

A hidden name is ``.NAME.TOKEN.sluice-partial``. Its writer holds its lock, which the system releases when the process
dies: a file that can be locked is a leftover and is removed. Members of a set end in ``.sluice-set-partial`` and are
protected by the lock of their directory. On file systems without locks leftovers are kept, as they cannot be told from
live files.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sluice._errors import SluiceError
from sluice._messages import save_error

try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
except ImportError:  # Windows refuses to delete open files, which protects live ones as well
    flock = None  # type: ignore[assignment]

__all__ = ["ATTEMPTS", "close", "hidden_path", "hidden_stem", "remove_leftovers", "saving", "syncing", "try_lock"]

_SUFFIX, _SET_SUFFIX = ".sluice-partial", ".sluice-set-partial"
_HIDDEN = re.compile(r"\.(?P<stem>.*)\.[0-9a-f]{16}(?P<suffix>\.sluice-partial|\.sluice-set-partial)", re.DOTALL)

#: Longest name of most file systems, in bytes.
_NAME_BYTES = 255

#: Attempts to create a hidden path and lock it before another process removes it as a leftover.
ATTEMPTS = 16

_REFUSED = "the operating system refused"

#: Errors of file systems that cannot sync a directory.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def saving(path: str) -> Iterator[None]:
    """Convert ``OSError`` inside the block to ``SaveError``."""
    try:
        yield
    except SluiceError:  # an error of reading the source is an OSError, too
        raise
    except OSError as error:
        raise save_error(_REFUSED, error, file=path) from error


def close(descriptor: int) -> None:
    """Unlock and close a descriptor, ignoring errors: everything that matters has been synced."""
    if flock is not None:
        with suppress(OSError):
            flock(descriptor, LOCK_UN)  # a forked child that has it open would keep the lock
    with suppress(OSError):
        os.close(descriptor)


def hidden_path(directory: str, name: str, *, in_set: bool = False) -> str:
    """Return a new hidden path for ``name``, which is shortened if it is too long."""
    token = f".{secrets.token_hex(8)}{_SET_SUFFIX if in_set else _SUFFIX}"
    return os.path.join(directory, f".{_cut(name)}{token}")


def _cut(name: str) -> str:
    room = _NAME_BYTES - len(_SET_SUFFIX) - 18
    return os.fsencode(name)[:room].decode(errors="ignore")


def hidden_stem(name: str, *, in_set: bool) -> str | None:
    """Return the final name of a hidden file, or None for any other file."""
    match = _HIDDEN.fullmatch(name)
    return match["stem"] if match and (match["suffix"] == _SET_SUFFIX) == in_set else None


def remove_leftovers(directory: str, name: str) -> None:
    """Remove the leftovers of dead writers of a name in a directory."""
    with os.scandir(directory) as entries:
        hidden = [entry.path for entry in entries if hidden_stem(entry.name, in_set=False) == _cut(name)]
    for path in hidden:
        with suppress(OSError):  # a leftover that cannot be removed must not fail the save
            descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
            try:
                if try_lock(descriptor):
                    os.unlink(path)
            finally:
                close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Return whether this process now holds the lock of an open file; None if locks are not supported."""
    if flock is None:
        return None
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def syncing(path: str, saved: str, *, commits: bool = False) -> Iterator[None]:
    """Sync a directory after the block, which creates, renames or removes names in it. No-op on Windows.

    Args:
        path: The directory; opened before the block, so that opening cannot fail after it.
        saved: Path that is being saved, for messages.
        commits: Whether the block commits the save, after which the old checkpoint no longer exists.

    Raises:
        SaveError: The operating system refused. With ``commits`` the new checkpoint may be in place nevertheless.
    """
    if not hasattr(os, "O_DIRECTORY"):
        yield
        return
    with saving(saved):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                what = "the new checkpoint is in place, but syncing its directory failed" if commits else _REFUSED
                refused = save_error(what, error, file=saved)
                if commits:
                    refused.advice = "Check the disk: a power failure now may lose the new checkpoint."
                raise refused from error
    finally:
        close(descriptor)
