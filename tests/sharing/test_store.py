"""The directory of shared copies: who may use it, and which copies make room for others."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sluice
from sluice.sharing import building
from sluice.sharing import store as stores
from sluice.sharing.store import copies, drop, open_store
from support.system_calls import failing
from support.watching import watch

_KIB = 1024
_KEY = "0123456789abcdef" * 2


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_SHARED_DIR", str(tmp_path / "store"))
    return open_store()


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Three checkpoints of 64 KiB."""
    found = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, path in enumerate(found):
        sluice.save({"w": torch.full((16 * _KIB,), float(number))}, path)
    return found


def test_the_directory_is_private_and_no_link_and_of_this_user(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(store)
    with pytest.raises(sluice.SaveError, match="must be a directory of this user"):
        open_store(tmp_path / "link")
    store.chmod(0o750)
    with pytest.raises(sluice.SaveError, match=r"expected user \d+, mode drwx------; found user \d+, mode drwxr-x---"):
        open_store()
    store.chmod(0o700)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(sluice.SaveError, match=f"expected user {other}"):
        open_store(store)


def test_a_linked_lock_is_not_followed(store: Path, paths: list[Path], tmp_path: Path) -> None:
    with sluice.shared(paths[0]) as copy:
        key = copy.key
    assert drop(store, key)
    (store / key).mkdir()
    (store / key / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(sluice.SaveError, match="symbolic links"):
        sluice.shared(paths[0])
    assert not (tmp_path / "victim").exists()


def test_shared_memory_that_is_too_small_is_said_before_a_byte_is_written(
    store: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=64, f_frsize=_KIB, f_bavail=64))
    conversions: list[dict[str, bool]] = []
    watch(monkeypatch, building, "convert", lambda *_, **options: conversions.append(options))
    with pytest.raises(sluice.BudgetError, match="--shm-size") as caught:
        sluice.shared(paths[0])
    assert "32.0 KiB for copies" in str(caught.value)
    assert all(options["dry_run"] for options in conversions)
    assert not list(store.iterdir())


def test_memory_that_is_left_bounds_a_copy_in_memory(
    store: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "filesystem_type", lambda _: "tmpfs")
    monkeypatch.setattr(stores, "machine_facts", lambda _: SimpleNamespace(host_headroom=(9 * _KIB, "free memory")))
    with pytest.raises(sluice.BudgetError, match=r"kept in memory.*9\.00 KiB \(free memory\)"):
        sluice.shared(paths[0])
    assert not list(store.iterdir())


def test_the_least_recently_used_copy_makes_room(store: Path, paths: list[Path]) -> None:
    keys = []
    for path in paths[:2]:
        with sluice.shared(path, max_bytes="140KiB") as copy:
            keys.append(copy.key)
    os.utime(store / keys[0] / "lock", (10, 10))
    os.utime(store / keys[1] / "lock", (5, 5))
    with sluice.shared(paths[2], max_bytes="140KiB") as copy:
        assert {each.key for each in copies(store)} == {keys[0], copy.key}


def test_copies_in_use_are_kept(store: Path, paths: list[Path]) -> None:
    with sluice.shared(paths[0], max_bytes="140KiB"), sluice.shared(paths[1], max_bytes="140KiB"):
        with pytest.raises(sluice.BudgetError, match="of which processes use"):
            sluice.shared(paths[2], max_bytes="140KiB")
        assert len(copies(store)) == 2


def test_what_a_killed_builder_of_another_copy_left_makes_room(store: Path, paths: list[Path]) -> None:
    dead = store / _KEY
    dead.mkdir()
    for name in ("lock", ".model.safetensors.0123456789abcdef.sluice-partial"):
        (dead / name).write_bytes(b"x")
    with sluice.shared(paths[0]) as copy:
        assert os.listdir(store) == [copy.key]


def test_what_is_not_a_copy_is_left_alone(store: Path, paths: list[Path]) -> None:
    own = [store / "notes" / "lock", store / _KEY / "a.txt"]
    for path in own:
        path.parent.mkdir()
        path.write_bytes(b"x")
    with sluice.shared(paths[0]):
        assert drop(store, "notes")
    assert all(path.exists() for path in own)


def test_a_lock_that_the_system_refuses_is_an_error_that_names_the_copy(
    store: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "flock", failing(errno.ENOLCK))
    with pytest.raises(sluice.SaveError, match=f"{store}/[0-9a-f]{{32}}.*cannot be locked: No locks available"):
        sluice.shared(paths[0])


def test_a_copy_that_cannot_be_locked_does_not_hide_or_stop_others(store: Path, paths: list[Path]) -> None:
    bad = store / _KEY
    bad.mkdir()
    (bad / "lock").symlink_to(paths[1])
    with sluice.shared(paths[0]) as copy:
        (bad / stores.FILE).touch()
        assert [each.key for each in copies(store)] == [copy.key]
