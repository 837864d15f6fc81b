"""Directories of a save: durable creation, locks, and atomic sets of files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from sluice._errors import SaveError
from sluice.sources.local import kind_of_file
from sluice.writing.durable.partial_files import ATTEMPTS, close, saving, syncing, try_lock
from sluice.writing.durable.replacement import Replacement

__all__ = ["locked_directory", "publish_set"]


@contextmanager
def locked_directory(path: str) -> Iterator[bool]:
    """Hold the lock of a directory during the block: hidden files in it are then leftovers of killed saves.

    Yields False on file systems without locks: hidden files may then be those of a live save.

    The directory and its parents are created durably; if the block fails, those that it created are removed again,
    unless they hold something or are locked.

    Raises:
        SaveError: The operating system refused, the path is not a directory, or another save holds the lock.
    """
    created: list[str] = []
    try:
        with ExitStack() as stack:
            yield _enter(path, created, stack)
    except BaseException:
        for each in reversed(created):
            _remove_unused(each)
        raise


def _enter(path: str, created: list[str], stack: ExitStack) -> bool:
    directory = os.path.realpath(path)
    attempts = ATTEMPTS
    while True:
        attempts -= 1
        try:
            _make(directory, path, created)
            return stack.enter_context(_locked(path))
        except SaveError as error:  # a failed save has removed the directory in the meantime
            if not isinstance(error.__cause__, FileNotFoundError) or not attempts:
                raise


def _remove_unused(directory: str) -> None:
    """Remove a directory that is empty and that no other save has locked to write to it."""
    with suppress(OSError, SaveError), _locked(directory):
        os.rmdir(directory)


def _make(directory: str, saved: str, created: list[str]) -> None:
    missing = []
    while not os.path.lexists(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    with saving(saved), suppress(FileNotFoundError):
        mode = os.lstat(directory).st_mode
        if not stat.S_ISDIR(mode):
            raise SaveError("not a directory", file=saved, found=kind_of_file(mode))
    for each in reversed(missing):
        with syncing(os.path.dirname(each), saved), saving(saved):
            try:
                os.mkdir(each)
            except FileExistsError:
                continue  # another process created it; if it is not a directory, the next step fails
            created.append(each)


@contextmanager
def _locked(path: str) -> Iterator[bool]:
    if not hasattr(os, "O_DIRECTORY"):
        yield False
        return
    with saving(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        locked = try_lock(descriptor)
        if locked is False:
            raise SaveError("another save is writing to this directory", file=path)
        with saving(path):
            if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
                raise FileNotFoundError(errno.ENOENT, "another save removed the directory before it could be locked")
        yield bool(locked)
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
