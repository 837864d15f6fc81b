"""Hidden names of what is being written, the locks that say who is alive, and what dead writers have left.

A hidden name is ``.NAME.TOKEN.sluice-partial``. Whoever writes to it holds its lock, which the system lets go when the
process dies: what can be locked belongs to nobody and is removed. Members of a set end in ``.sluice-set-partial``: the
lock of their directory stands for theirs. On file systems without locks leftovers stay, as nobody can tell.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from sluice._errors import SaveError

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows refuses to delete files that are open, which protects a live one as well
    flock = None  # type: ignore[assignment]

__all__ = ["ATTEMPTS", "close", "hidden_path", "hidden_stem", "remove_leftovers", "saving", "syncing", "try_lock"]

_SUFFIX, _SET_SUFFIX = ".sluice-partial", ".sluice-set-partial"
_HIDDEN = re.compile(r"\.(?P<stem>.*)\.[0-9a-f]{16}(?P<suffix>\.sluice-partial|\.sluice-set-partial)", re.DOTALL)

#: Longest name of most file systems, in bytes.
_NAME_BYTES = 255

#: Attempts to make something hidden that nobody removed before it was locked; each failure takes another's help.
ATTEMPTS = 16

_REFUSED = "the operating system refused"

#: Some file systems have no way to sync a directory; their answers.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def saving(path: str) -> Iterator[None]:
    """Turn the operating system's errors inside the block into ``SaveError``."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"{_REFUSED}: {error.strerror or error}", file=path) from error


def close(descriptor: int) -> None:
    """Close a file of which everything that matters has been synced: nothing more can be lost."""
    with suppress(OSError):
        os.close(descriptor)


def hidden_path(directory: str, name: str, *, in_set: bool = False) -> str:
    """Return a new hidden path for what will have the name; of long names it has as much as fits."""
    token = f".{secrets.token_hex(8)}{_SET_SUFFIX if in_set else _SUFFIX}"
    return os.path.join(directory, f".{_cut(name)}{token}")


def _cut(name: str) -> str:
    room = _NAME_BYTES - len(_SET_SUFFIX) - 18
    return os.fsencode(name)[:room].decode(errors="ignore")


def hidden_stem(name: str, *, in_set: bool) -> str | None:
    """Return the name that a hidden file was to have, or None for another file."""
    match = _HIDDEN.fullmatch(name)
    return match["stem"] if match and (match["suffix"] == _SET_SUFFIX) == in_set else None


def remove_leftovers(directory: str, name: str, remove: Callable[[str], None] = os.unlink) -> None:
    """Remove what dead writers of this name have left.

    Args:
        directory: Where to look.
        name: The name that they were writing.
        remove: What removes a path, which is locked meanwhile.
    """
    with os.scandir(directory) as entries:
        hidden = [entry.path for entry in entries if hidden_stem(entry.name, in_set=False) == _cut(name)]
    for path in hidden:
        with suppress(OSError):  # not ours to remove: the save itself will say what it cannot do
            kind = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR
            descriptor = os.open(path, kind | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
            try:
                if try_lock(descriptor):
                    remove(path)
            finally:
                close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Return whether this process now holds the lock of an open file; None where there are no locks."""
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
    """Make the names durable that the block gives or takes in a directory; a no-op where directories do not open.

    Args:
        path: The directory. It is opened before the block, so that this cannot fail after it.
        saved: What is being saved; for messages.
        commits: The block is the last step of the save: afterwards the old checkpoint is no more.

    Raises:
        SaveError: The operating system refused. After a last step the new checkpoint is in place nevertheless.
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
                raise SaveError(f"{what}: {error.strerror}", file=saved) from error
    finally:
        close(descriptor)
