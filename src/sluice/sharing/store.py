"""The directory of the copies: one private directory for each key, with a lock and the finished file.

A user of a copy holds the lock of its directory shared, a builder exclusively: the system releases it when the process
ends. A copy whose lock can be taken exclusively has no user, and may be dropped. The time of the lock file is that of
the last use, and its content identifies the finished file: one that was changed or replaced is built again.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from sluice._errors import BudgetError, SaveError, UnsupportedError
from sluice._messages import save_error
from sluice._units import format_bytes
from sluice.machine.facts import machine_facts
from sluice.machine.filesystems import filesystem_type
from sluice.sources.descriptors import OwnedFile

if sys.platform != "win32":
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock

__all__ = [
    "FILE",
    "VARIABLE",
    "StoredCopy",
    "copies",
    "drop",
    "is_finished",
    "lock_free",
    "lock_shared",
    "make_room",
    "open_store",
    "remove",
    "seal",
]

#: Environment variable with the directory.
VARIABLE = "SLUICE_SHARED_DIR"

#: The finished file in the directory of a copy.
FILE = "model.safetensors"

_LOCK = "lock"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the directory below it is private and checked


class StoredCopy(Struct, frozen=True, kw_only=True):
    """One finished copy."""

    key: str
    nbytes: int
    #: When a process last found it, in seconds since the epoch.
    used: float
    in_use: bool


def open_store(directory: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory of the copies, which is made if it is missing.

    Raises:
        SaveError: It cannot be made, is a link, belongs to another user, or others have access to it.
        UnsupportedError: The system has no such locks, or no shared memory and no directory was given.
    """
    if sys.platform == "win32":
        raise UnsupportedError("copies for all processes need the file locks of Linux and macOS")
    chosen, runtime = directory or os.environ.get(VARIABLE), os.environ.get("XDG_RUNTIME_DIR")
    if not chosen and _SHARED_MEMORY.is_dir():
        chosen = _SHARED_MEMORY / f"sluice-{os.geteuid()}"
    elif not chosen and runtime:
        chosen = os.path.join(runtime, "sluice")
    if not chosen:
        raise UnsupportedError("this system has no /dev/shm", advice=f"Pass directory=, or set {VARIABLE}.")
    path = Path(os.path.expanduser(chosen))
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise save_error("the directory of shared copies cannot be made", error, file=str(path)) from error
    refused = not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077
    if refused:
        raise SaveError(
            "the directory of shared copies must be a directory of this user alone",
            file=str(path),
            expected=f"user {os.geteuid()}, mode drwx------",
            found=f"user {found.st_uid}, mode {stat.filemode(found.st_mode)}",
            advice="Remove it or correct it with `chmod 700`, or pass a different directory=.",
        )
    return path


def lock_shared(folder: Path, *, changed: bool = False) -> OwnedFile | None:
    """Return the open lock of a copy that this process now uses; None if it is being built, or not finished."""
    lock = _locked(folder, LOCK_SH)
    if lock is None or not (changed or is_finished(folder)):
        return None
    os.utime(lock.fileno())
    return lock


def seal(folder: Path, lock: OwnedFile) -> None:
    """Make a built copy read-only, remember it and share its lock, which the caller has exclusively."""
    (folder / FILE).chmod(0o400)
    (folder / _LOCK).write_text(_identity(folder))
    flock(lock, LOCK_SH)  # a child that was forked meanwhile keeps it


def is_finished(folder: Path) -> bool:
    """Return whether a copy is the file that was sealed."""
    with suppress(OSError, ValueError):
        return (folder / _LOCK).read_text() == _identity(folder)
    return False


def _identity(folder: Path) -> str:
    found = (folder / FILE).lstat()
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


def lock_free(folder: Path) -> OwnedFile | None:
    """Return the open lock of a copy without a user or builder, exclusively; None if there is one."""
    return _locked(folder, LOCK_EX)


def _locked(folder: Path, kind: int) -> OwnedFile | None:
    """Lock a copy without waiting, until the file is closed; None if others have it or drop it.

    Raises:
        SaveError: The system refused the directory, the file or the lock.
    """
    path = folder / _LOCK
    try:
        while True:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            with suppress(FileNotFoundError):  # dropped in between
                file = OwnedFile.open(str(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
                break
        with suppress(BlockingIOError, FileNotFoundError):
            flock(file, kind | LOCK_NB)
            return file if os.path.samestat(os.fstat(file.fileno()), path.lstat()) else None
    except OSError as error:
        raise save_error("the shared copy cannot be locked", error, file=str(folder)) from error
    return None


def _folders(store: Path) -> list[Path]:
    """Return the directories of copies, finished or not; everything else in the store belongs to the user."""
    return [
        folder
        for folder in store.iterdir()
        if re.fullmatch("[0-9a-f]{32}", folder.name) and not folder.is_symlink() and (folder / _LOCK).is_file()
    ]


def copies(store: Path) -> list[StoredCopy]:
    """Return the finished copies, those first that were not used for the longest time."""
    found = []
    for folder in _folders(store):
        with suppress(OSError, SaveError):  # dropped in between, or one that cannot be locked
            nbytes, used = (folder / FILE).lstat().st_size, (folder / _LOCK).lstat().st_mtime
            found.append(StoredCopy(key=folder.name, nbytes=nbytes, used=used, in_use=lock_free(folder) is None))
    return sorted(found, key=lambda copy: copy.used)


def drop(store: Path, key: str) -> bool:
    """Remove a copy, finished or not, unless a process uses or builds it; return whether it is gone."""
    folder = store / key
    if folder not in _folders(store):
        return True
    lock = lock_free(folder)
    if lock is None:
        return False
    with lock:
        remove(folder)
    return True


def remove(folder: Path) -> None:
    """Remove the directory of a copy, whose lock the caller has exclusively; the lock goes last."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == _LOCK):
        path.unlink()
    with suppress(OSError):  # a process has made its lock in it just now
        folder.rmdir()


def make_room(store: Path, nbytes: int, max_bytes: int | None) -> None:
    """Drop unused copies until another one fits, those first that were not used for the longest time.

    Raises:
        BudgetError: It does not fit, even if all of them were dropped; they stay.
    """
    for folder in _folders(store):
        if not (folder / FILE).exists():
            with suppress(SaveError):  # it cannot be locked
                drop(store, folder.name)  # what a killed builder has left
    system = os.statvfs(store)
    most = system.f_blocks * system.f_frsize // 2 if max_bytes is None else max_bytes
    free = system.f_bavail * system.f_frsize
    stored = copies(store)
    held = sum(copy.nbytes for copy in stored if copy.in_use)
    unused = [copy for copy in stored if not copy.in_use]
    room = min(most - held, free + sum(copy.nbytes for copy in unused))
    if nbytes > room:
        used = f", of which processes use {format_bytes(held)}" if held else ""
        limit = f"{format_bytes(most)} for copies{used}, {format_bytes(free)} free in the file system"
        raise _no_room(f"the shared copy takes {format_bytes(nbytes)}", limit, nbytes, store)
    while unused and (nbytes > free or nbytes > most - held - sum(copy.nbytes for copy in unused)):
        oldest = unused.pop(0)
        if drop(store, oldest.key):
            free += oldest.nbytes
        else:
            held += oldest.nbytes
    left, origin = machine_facts(()).host_headroom
    if nbytes > left and filesystem_type(str(store)) == "tmpfs":
        raise _no_room("the shared copy is kept in memory", f"{format_bytes(left)} ({origin})", nbytes, store)


def _no_room(problem: str, limit: str, nbytes: int, store: Path) -> BudgetError:
    error = BudgetError(problem, file=str(store), expected=f"at most {limit}", found=format_bytes(nbytes))
    error.advice = (
        "Nothing was written: enlarge the shared memory (`docker run --shm-size=SIZE`, `mount -o remount,size=SIZE "
        "/dev/shm`), allow more with max_bytes=, choose a smaller dtype, or pass directory= on a different file system."
    )
    return error
