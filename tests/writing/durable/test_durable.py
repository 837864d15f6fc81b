"""Files that are replaced atomically: hidden names, commits and other writers; directories that saves use at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import SaveError
from sluice.writing.durable import directories as _directories
from sluice.writing.durable.directories import locked_directory
from sluice.writing.durable.partial_files import ATTEMPTS, hidden_path, hidden_stem
from sluice.writing.durable.replacement import Replacement
from support.system_calls import failing
from support.watching import watch

NEW = b"new" * 1000
TWO = {"a": torch.ones(40), "b": torch.ones(40)}


def write(path: Path, content: bytes = NEW, *, overwrite: bool = True) -> None:
    with Replacement(path, overwrite=overwrite) as file:
        file.reserve(len(content) + 100)
        file.write_at(10, content[10:])
        file.write_at(0, content[:10])
        file.commit(nbytes=len(content))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_existing_files_are_kept_unless_overwriting_is_requested(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(sluice.SaveError, match=r"already exists; pass overwrite=True"):
        Replacement(tmp_path / "f", overwrite=False)
    with Replacement(tmp_path / "g", overwrite=False) as file:
        (tmp_path / "g").write_bytes(b"faster")
        with pytest.raises(sluice.SaveError, match="another process created the file"):
            file.commit()
    assert (tmp_path / "g").read_bytes() == b"faster"
    assert names(tmp_path) == ["f", "g"]


@pytest.mark.parametrize("error", [errno.ENOTSUP, errno.EINVAL])  # of macOS and Windows
def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    monkeypatch.setattr(os, "link", failing(error))
    write(tmp_path / "f", overwrite=False)
    assert names(tmp_path) == ["f"]


def test_a_live_hidden_file_is_left_and_a_dead_one_removed(tmp_path: Path) -> None:
    with Replacement(tmp_path / "f", overwrite=True) as slow:
        slow.write_at(0, b"slow")
        (tmp_path / ".f.0123456789abcdef.sluice-partial").write_bytes(b"dead")
        (tmp_path / ".fg.0123456789abcdef.sluice-partial").write_bytes(b"another name's")
        write(tmp_path / "f")
        assert len([name for name in names(tmp_path) if name.startswith(".f.")]) == 1
        slow.commit()
    assert (tmp_path / "f").read_bytes() == b"slow"
    assert names(tmp_path) == [".fg.0123456789abcdef.sluice-partial", "f"]


@pytest.mark.parametrize("name", ["model.pt", ".hidden", "a b\n.c", "ü.safetensors"])
@pytest.mark.parametrize("in_set", [False, True])
def test_a_hidden_path_contains_its_final_name(tmp_path: Path, name: str, *, in_set: bool) -> None:
    path = hidden_path(str(tmp_path), name, in_set=in_set)
    assert os.path.dirname(path) == str(tmp_path)
    assert path != hidden_path(str(tmp_path), name, in_set=in_set)
    assert hidden_stem(os.path.basename(path), in_set=in_set) == name
    assert hidden_stem(os.path.basename(path), in_set=not in_set) is None
    assert hidden_stem(name, in_set=in_set) is None


def test_a_long_name_is_shortened_to_what_file_systems_take(tmp_path: Path) -> None:
    name = "ü" * 127
    path = hidden_path(str(tmp_path), name, in_set=True)
    Path(path).touch()
    stem = hidden_stem(os.path.basename(path), in_set=True)
    assert stem
    assert name.startswith(stem)


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
    with ExitStack() as others:
        # Between creating and locking the directory.
        watch(monkeypatch, _directories, "_locked", lambda _: others.enter_context(held_by_another(path)))
        with pytest.raises(SaveError, match="another save is writing"), locked_directory(str(path)):
            pass
        assert path.is_dir()


@pytest.mark.parametrize("times", [1, ATTEMPTS])
def test_a_directory_that_vanishes_before_it_is_opened_is_made_again_unless_it_always_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    path, entered = tmp_path / "above" / "model", list[str]()

    def vanish(name: str) -> None:
        entered.append(name)
        if len(entered) <= times:
            path.rmdir()
            path.parent.rmdir()

    watch(monkeypatch, _directories, "_locked", vanish)
    fails = pytest.raises(SaveError, match="No such file") if times == ATTEMPTS else nullcontext()
    with fails, locked_directory(str(path)):
        assert path.is_dir()
    assert len(entered) == (2 if times == 1 else 3 * ATTEMPTS)  # and for each directory that it made, to remove it
    assert not list(tmp_path.iterdir()) or times == 1


def test_a_directory_that_vanishes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, locked = tmp_path / "model", list[int]()

    def vanish(descriptor: int) -> None:
        locked.append(descriptor)
        if len(locked) == 1:
            path.rmdir()

    watch(monkeypatch, _directories, "try_lock", vanish)
    with locked_directory(str(path)):
        (path / "file").touch()  # the locked directory still has its name
    assert len(locked) == 2


def test_a_child_that_a_save_forked_does_not_hold_its_lock(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    with locked_directory(str(tmp_path)):
        child = os.fork()
        if not child:
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
    try:
        with locked_directory(str(tmp_path)) as locked:
            assert locked
    finally:
        os.close(writes)
        os.waitpid(child, 0)
        os.close(reads)


@pytest.mark.parametrize("form", [{"max_shard_size": 200}, {"format": "dcp"}], ids=["shards", "dcp"])
def test_without_locks_nothing_hidden_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]
) -> None:
    monkeypatch.setattr(_directories, "try_lock", lambda _: None)
    sluice.save(TWO, tmp_path, **form)
    hidden = Path(hidden_path(str(tmp_path), "model.safetensors.index.json", in_set=True))
    hidden.touch()
    sluice.save(TWO, tmp_path, **form, overwrite=True)
    assert hidden.exists()


@pytest.mark.parametrize("index", ["damaged", "renamed", "removed"])
def test_a_refused_save_removes_no_shard(tmp_path: Path, index: str) -> None:
    for _ in range(2):  # the second model has names with a token
        sluice.save(TWO, tmp_path, max_shard_size=200, overwrite=True)
    path = tmp_path / "model.safetensors.index.json"
    if index == "damaged":
        os.truncate(path, 50)
    else:
        path.rename(tmp_path / "a.safetensors.index.json" if index == "renamed" else tmp_path.with_suffix(".json"))
    before = names(tmp_path)
    with pytest.raises(sluice.SaveError, match="already contains a model"):
        sluice.save(TWO, tmp_path)
    assert names(tmp_path) == before
    sluice.save(TWO, tmp_path, overwrite=True)
    assert [name for name in names(tmp_path) if name.startswith("model")] == ["model.safetensors"]
