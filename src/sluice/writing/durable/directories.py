"""Directories of a save: made durably, held by one writer, filled with sets of files, or replaced as a whole."""

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

#: Arguments of Linux's ``renameat2``: paths are relative to the working directory; both names change their content.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def made_directory(path: str, enter: Callable[[], AbstractContextManager[_Inside]]) -> Iterator[_Inside]:
    """Make a directory and those above it durably; when the block fails, remove those that it made and nobody uses.

    Args:
        path: The directory.
        enter: Makes a context inside it, of which the value is lent. It is made again where a save that failed has
            removed the directory meanwhile.

    Raises:
        SaveError: The operating system refused, or something else has the name.
    """
    made: list[str] = []
    try:
        with ExitStack() as stack:
            yield _enter(path, enter, made, stack)
    except BaseException:
        for each in reversed(made):
            _remove_unused(each)
        raise


def _enter(
    path: str, enter: Callable[[], AbstractContextManager[_Inside]], made: list[str], stack: ExitStack
) -> _Inside:
    directory = os.path.realpath(path)
    attempts = ATTEMPTS
    while True:
        attempts -= 1
        try:
            _make(directory, path, made)
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


def _make(directory: str, saved: str, made: list[str]) -> None:
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
                continue  # somebody was faster, and it is a directory or the next step fails
            made.append(each)


def _check_directory(path: str, saved: str) -> None:
    """Raise ``SaveError`` where something else than a directory has the name."""
    with saving(saved):
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return
    if not stat.S_ISDIR(found.st_mode):
        raise SaveError("this is no directory", file=saved, found=kind_of_file(found.st_mode))


@contextmanager
def locked_directory(path: str) -> Iterator[None]:
    """Hold a directory's lock during the block, so that what another save left there is known to be dead.

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
                raise FileNotFoundError(errno.ENOENT, "another save removed the directory before it was locked")
        yield
    finally:
        close(descriptor)


def publish_set(
    directory: str, files: Sequence[Replacement], last: Callable[[], None], is_done: Callable[[], bool]
) -> None:
    """Name sealed files and then take the step that makes them count; without it, none of them keeps its name.

    Args:
        directory: The one that all are in.
        files: What nothing refers to before the last step.
        last: The last step.
        is_done: Whether it has happened.

    Raises:
        SaveError: The operating system refused.
    """
    with syncing(directory, directory):
        pass  # the hidden names, one of which tells a later save what was to be published
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
    """Lend a hidden directory that takes the place of another, or of nothing, when the block ends well.

    Files of the old directory that do not belong to what is replaced are taken over by hard links.

    Args:
        path: The directory to make or replace; symbolic links are followed.
        belongs: Whether a file of this name belongs to what is replaced.
        check: Called with the finished hidden directory before it takes its place.

    Raises:
        SaveError: The operating system refused, or the old directory holds what cannot be taken over.
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
    """Make and lock a hidden directory, and remove it or what has taken its place after the block."""
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
                    continue  # another writer took it for a leftover before it was locked
            yield hidden
            return
    raise SaveError("hidden directories of this save are removed as fast as they are made", file=path)


def _name(hidden: str, final: str, path: str) -> None:
    try:
        os.rename(hidden, final)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        raise SaveError("the directory was made by somebody else meanwhile", file=path) from error


def _others(final: str, path: str, belongs: Callable[[str], bool]) -> list[str] | None:
    """Return the names in the old directory that stay; None when there is no directory."""
    with saving(path):
        try:
            with os.scandir(final) as entries:
                found = [entry for entry in entries if not belongs(entry.name)]
        except FileNotFoundError:
            return None
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                problem = "a directory that holds others cannot be replaced as a whole; save into a new one"
                raise SaveError(problem, file=path, found=entry.name)
    return [entry.name for entry in found]


def exchange(one: str, other: str) -> None:
    """Let two paths change their content in one step."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if swap is None:
        raise SaveError("this system cannot exchange two directories; save into a new one", file=other)
    if swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} (exchanging two directories; save into a new one)")


def _remove(hidden: str, belongs: Callable[[str], bool]) -> None:
    """Remove a hidden directory: an unfinished one, or the old one after the exchange.

    What somebody has put into it since stays, with the directory.
    """
    with suppress(OSError):
        for path in _expendable(hidden, belongs):
            os.unlink(path)
        os.rmdir(hidden)


def _expendable(hidden: str, belongs: Callable[[str], bool]) -> Iterable[str]:
    with os.scandir(hidden) as entries:
        return [entry.path for entry in entries if belongs(entry.name) or os.lstat(entry.path).st_nlink > 1]
