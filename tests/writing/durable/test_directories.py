"""Directories that several saves create, use and remove concurrently."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

import pytest

from sluice import SaveError
from sluice.writing.durable import directories as _directories
from sluice.writing.durable.directories import locked_directory
from sluice.writing.durable.partial_files import ATTEMPTS, try_lock


@contextmanager
def held_by_another(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def test_a_refused_save_leaves_the_directory_that_it_made_to_the_one_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "above" / "model"
    real = _directories._locked
    with ExitStack() as others:

        def lock(name: str) -> AbstractContextManager[None]:
            others.enter_context(held_by_another(path))  # between creating and locking the directory
            return real(name)

        monkeypatch.setattr(_directories, "_locked", lock)
        with pytest.raises(SaveError, match="another save is writing"), locked_directory(str(path)):
            pass
        assert path.is_dir()


@pytest.mark.parametrize("times", [1, ATTEMPTS])
def test_a_directory_that_vanishes_before_it_is_opened_is_made_again_unless_it_always_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    path = tmp_path / "above" / "model"
    entered, real = [], _directories._locked

    def lock(name: str) -> AbstractContextManager[None]:
        entered.append(1)
        if len(entered) <= times:
            path.rmdir()
            path.parent.rmdir()
        return real(name)

    monkeypatch.setattr(_directories, "_locked", lock)
    fails = pytest.raises(SaveError, match="No such file") if times == ATTEMPTS else nullcontext()
    with fails, locked_directory(str(path)):
        assert path.is_dir()
    assert len(entered) == min(times + 1, ATTEMPTS)
    assert not list(tmp_path.iterdir()) or times == 1


def test_a_directory_that_vanishes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    locked = []

    def lock(descriptor: int) -> bool | None:
        locked.append(descriptor)
        if len(locked) == 1:
            path.rmdir()
        return try_lock(descriptor)

    monkeypatch.setattr(_directories, "try_lock", lock)
    with locked_directory(str(path)):
        (path / "file").touch()  # the locked directory still has its name
    assert len(locked) == 2
