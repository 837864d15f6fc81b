"""Directories of a save: durable creation, locks, atomic sets of files, and replacement as a whole."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TypeVar

from sluice._errors import SaveError
from sluice.writing.durable.partial_files import (
    ATTEMPTS,
    close,
    hidden_path,
    remove_leftovers,
    saving,
    syncing,
    try_lock,
)
from sluice.writing.durable.replacement import Replacement, kind_of_file

__all__ = ["locked_directory", "made_directory", "publish_set", "replaced_directory"]

_Inside = TypeVar("_Inside")

#: Arguments of Linux's ``renameat2``: paths relative to the working directory; exchange the two names.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def made_directory(path: str, enter: Callable[[], AbstractContextManager[_Inside]]) -> Iterator[_Inside]:
    """Create a directory and its parents durably; if the block fails, remove those created that are empty and unlocked.

    Args:
        path: The directory.
        enter: Returns a context manager inside the directory, whose value is lent. Called again if a failed save has
            removed the directory in the meantime.

    Raises:
        SaveError: The operating system refused, or the path exists and is not a directory.
    """
    created: list[str] = []
    try:
        with ExitStack() as stack:
            yield _enter(path, enter, created, stack)
    except BaseException:
        for each in reversed(created):
            _remove_unused(each)
        raise


def _enter(
    path: str, enter: Callable[[], AbstractContextManager[_Inside]], created: list[str], stack: ExitStack
) -> _Inside:
    directory = os.path.realpath(path)
    attempts = ATTEMPTS
    while True:
        attempts -= 1
        try:
            _make(directory, path, created)
            return stack.enter_context(enter())
        except SaveError as error:
            if not isinstance(error.__cause__, FileNotFoundError) or not attempts:
                raise


def _remove_unused(directory: str) -> None:
    """Remove a directory that is empty and that no other save has locked to write to it."""
    with suppress(OSError):
        if not hasattr(os, "O_DIRECTORY"):
            os.rmdir(directory)
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if try_lock(descriptor) is not False:
                os.rmdir(directory)
        finally:
            close(descriptor)


def _make(directory: str, saved: str, created: list[str]) -> None:
    missing = []
    while not os.path.lexists(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    _check_directory(directory, saved)
    for each in reversed(missing):
        with syncing(os.path.dirname(each), saved), saving(saved):
            try:
                os.mkdir(each)
            except FileExistsError:
                continue  # another process created it; if it is not a directory, the next step fails
            created.append(each)


def _check_directory(path: str, saved: str) -> None:
    """Raise ``SaveError`` if the path exists and is not a directory."""
    with saving(saved):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return
    if not stat.S_ISDIR(status.st_mode):
        raise SaveError("not a directory", file=saved, found=kind_of_file(status.st_mode))


@contextmanager
def locked_directory(path: str) -> Iterator[None]:
    """Hold the lock of a directory during the block: hidden files in it are then leftovers of killed saves.

    Raises:
        SaveError: Another save holds it.
    """
    if not hasattr(os, "O_DIRECTORY"):
        yield
        return
    with saving(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if try_lock(descriptor) is False:
            raise SaveError("another save is writing to this directory", file=path)
        with saving(path):
            if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
                raise FileNotFoundError(errno.ENOENT, "another save removed the directory before it could be locked")
        yield
    finally:
        close(descriptor)


def publish_set(
    directory: str, files: Sequence[Replacement], last: Callable[[], None], is_done: Callable[[], bool]
) -> None:
    """Rename sealed files into place, then run the step that commits them; if it fails, remove them again.

    Args:
        directory: The directory of all files.
        files: Files to which nothing refers before the last step.
        last: The last step.
        is_done: Returns whether the last step has taken effect.

    Raises:
        SaveError: The operating system refused.
    """
    with syncing(directory, directory):
        pass  # sync the hidden names: a hidden index tells a later save which files were to be published
    named: list[Replacement] = []
    try:
        with syncing(directory, directory):
            for file in files:
                named.append(file)
                file.publish()
        with syncing(directory, directory, commits=True), saving(directory):
            last()
    except BaseException:
        if not is_done():
            for file in named:
                file.withdraw()
        raise


@contextmanager
def replaced_directory(path: str, *, belongs: Callable[[str], bool], check: Callable[[str], None]) -> Iterator[str]:
    """Lend a hidden directory that replaces or creates the directory at ``path`` if the block succeeds.

    Files of the old directory that do not belong to the replaced content are kept, as hard links.

    Args:
        path: The directory to create or replace; symbolic links are followed.
        belongs: Returns whether a file of this name belongs to the replaced content.
        check: Called with the finished hidden directory before it is renamed.

    Raises:
        SaveError: The operating system refused, or the old directory contains something that cannot be kept.
    """
    final = os.path.realpath(path)
    parent, name = os.path.split(final)
    _check_directory(final, path)
    with ExitStack() as stack:
        hidden = stack.enter_context(made_directory(parent, lambda: _hidden_directory(parent, name, path, belongs)))
        yield hidden
        others = _others(final, path, belongs)
        with syncing(hidden, path), saving(path):
            if others is not None:
                for other in others:
                    os.link(os.path.join(final, other), os.path.join(hidden, other), follow_symlinks=False)
                os.chmod(hidden, stat.S_IMODE(os.stat(final).st_mode))
        check(hidden)
        with syncing(parent, path, commits=True), saving(path):
            if others is None:
                _name(hidden, final, path)
            else:
                exchange(hidden, final)


@contextmanager
def _hidden_directory(parent: str, name: str, path: str, belongs: Callable[[str], bool]) -> Iterator[str]:
    """Create and lock a hidden directory; after the block, remove the directory with its name, new or old."""
    with saving(path):
        remove_leftovers(parent, name, lambda leftover: _remove(leftover, belongs))
    for _ in range(ATTEMPTS):
        hidden = hidden_path(parent, name)
        with ExitStack() as stack:
            with saving(path):
                stack.callback(_remove, hidden, belongs)
                os.mkdir(hidden)
                descriptor = os.open(hidden, os.O_RDONLY)
                stack.callback(close, descriptor)
                if try_lock(descriptor) is False or not os.path.lexists(hidden):
                    continue  # another writer removed it as a leftover before it was locked
            yield hidden
            return
    raise SaveError("other processes keep removing the hidden directory of this save", file=path)


def _name(hidden: str, final: str, path: str) -> None:
    try:
        os.rename(hidden, final)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        raise SaveError("another process created the directory in the meantime", file=path) from error


def _others(final: str, path: str, belongs: Callable[[str], bool]) -> list[str] | None:
    """Return the names in the old directory that are kept; None if there is no directory."""
    with saving(path):
        try:
            with os.scandir(final) as entries:
                kept = [entry for entry in entries if not belongs(entry.name)]
        except FileNotFoundError:
            return None
        for entry in kept:
            if entry.is_dir(follow_symlinks=False):
                problem = "a directory with subdirectories cannot be replaced; save into a new one"
                raise SaveError(problem, file=path, found=entry.name)
    return [entry.name for entry in kept]


def exchange(first: str, second: str) -> None:
    """Exchange two paths atomically."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if swap is None:
        raise SaveError("this system cannot exchange two directories; save into a new one", file=second)
    if swap(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} (exchanging two directories; save into a new one)")


def _remove(hidden: str, belongs: Callable[[str], bool]) -> None:
    """Remove a hidden directory: an unfinished one, or after the exchange the old one.

    Files that were added to it in the meantime are kept, and so is the directory then.
    """
    with suppress(OSError):
        for path in _expendable(hidden, belongs):
            os.unlink(path)
        os.rmdir(hidden)


def _expendable(hidden: str, belongs: Callable[[str], bool]) -> Iterable[str]:
    with os.scandir(hidden) as entries:
        return [entry.path for entry in entries if belongs(entry.name) or os.lstat(entry.path).st_nlink > 1]
