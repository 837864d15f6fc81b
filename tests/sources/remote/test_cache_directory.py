"""Cache directories: their bound, what is removed, what is in use, and who may write to them."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import pytest

from sluice import _defaults as defaults
from sluice.sources.protocol import Source
from sluice.sources.remote import cache_directory
from sluice.sources.remote.cache_directory import CacheEntry
from sluice.sources.remote.caching import CompleteFile
from support.cached_objects import PIECE, VersionedObject, content, entries, loaded, opened, parts

CONTENT = content()

#: Room for two objects, with a record for the piece of each.
BOUND = 2 * (len(CONTENT) + 8)


def named(number: int) -> VersionedObject:
    return VersionedObject(content(seed=number), path=f"https://host/{number}.bin")


def load(number: int, cache: Path, bound: int | str | None = None) -> Source:
    """Return a closed source of which all bytes were read."""
    remote = named(number)
    source = opened(remote, cache, bound)
    assert loaded(source) == remote.content
    return source


def is_complete(number: int, cache: Path) -> bool:
    source = opened(named(number), cache)
    source.close()
    return isinstance(source, CompleteFile)


def note(source: Source) -> str:
    return str(getattr(source, "note", None))


def test_the_least_recently_used_is_removed(tmp_path: Path) -> None:
    load(1, tmp_path)
    load(2, tmp_path)
    load(1, tmp_path)
    load(3, tmp_path, BOUND)
    assert [is_complete(number, tmp_path) for number in (1, 2, 3)] == [True, False, True]
    assert sum(path.stat().st_size for path in entries(tmp_path) + parts(tmp_path)) <= BOUND


def test_what_is_in_use_is_not_removed(tmp_path: Path) -> None:
    load(1, tmp_path)
    load(2, tmp_path)
    used = [opened(named(number), tmp_path) for number in (1, 2)]
    assert "leaves no room" in note(load(3, tmp_path, BOUND))
    assert all(loaded(source) == named(number).content for number, source in enumerate(used, 1))
    assert "leaves no room" not in note(load(3, tmp_path, BOUND))


def test_nothing_is_removed_if_what_is_not_in_use_leaves_no_room(tmp_path: Path) -> None:
    load(1, tmp_path)
    load(2, tmp_path)
    used = opened(named(1), tmp_path)
    larger = VersionedObject(content(len(CONTENT) + PIECE))
    source = opened(larger, tmp_path, BOUND)
    assert loaded(source) == larger.content
    assert "leaves no room" in note(source)
    used.close()
    assert is_complete(2, tmp_path)


def test_downloads_at_once_do_not_count_on_the_same_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "CACHE_FREE_BYTES", 0)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=len(CONTENT) * 3 // 2, f_frsize=1))
    other = CacheEntry(tmp_path, bound=1 << 30, key="0" * 64, nbytes=len(CONTENT))
    with other.writing(lambda: None):
        assert "leaves no room" in note(load(1, tmp_path))
    assert "leaves no room" not in note(load(1, tmp_path))
    assert parts(tmp_path)  # no process writes it any more, so that it needs no space


def test_a_child_that_was_forked_meanwhile_keeps_no_file_in_use(tmp_path: Path) -> None:
    """It has inherited the descriptor. Closing its own source does not end the use of its parent."""
    entry = CacheEntry(tmp_path, bound=1 << 30, key="0" * 64, nbytes=10)
    with entry.writing(lambda: None) as part:
        assert part is not None
        inherited = [os.dup(part.file.fileno())]
    with entry.writing(lambda: pytest.fail("it is locked")) as part:
        assert part is not None
    load(1, tmp_path)
    source = opened(named(1), tmp_path)
    assert isinstance(source, CompleteFile)
    assert source._cached is not None
    inherited.append(os.dup(source._cached.file.fileno()))
    child = os.fork()
    if not child:
        source.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert "leaves no room" in note(load(2, tmp_path, BOUND - 1))
    source.close()
    assert "leaves no room" not in note(load(2, tmp_path, BOUND - 1))
    for descriptor in inherited:
        os.close(descriptor)


def test_files_in_use_leave_descriptors_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_directory, "_IN_USE", WeakSet())
    for number in range(5):
        load(number, tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda _: (7, 7))
    used = [opened(named(number), tmp_path) for number in range(5)]
    assert [isinstance(source, CompleteFile) for source in used] == [True, True, True, False, False]
    assert "too many of its files are in use at once (ulimit -n)" in note(used[3])
    further = load(6, tmp_path)
    assert "too many" in note(further)
    assert not parts(tmp_path)
    for number, source in enumerate(used):
        assert loaded(source) == named(number).content
    assert "too many" not in note(load(6, tmp_path))


def test_nothing_is_removed_for_what_has_no_room_anyway(tmp_path: Path) -> None:
    load(1, tmp_path)
    assert "leaves no room" in note(load(2, tmp_path, len(CONTENT) - 1))
    assert is_complete(1, tmp_path)
    assert "leaves no room" not in note(load(3, tmp_path, BOUND))
    assert is_complete(1, tmp_path)  # what was refused takes no room


def test_parts_count_as_whole_files(tmp_path: Path) -> None:
    load(1, tmp_path)
    (file,) = entries(tmp_path)
    file.rename(file.with_suffix(".part"))
    os.truncate(file.with_suffix(".part"), 10)
    load(2, tmp_path, BOUND - 1)
    assert not parts(tmp_path)


def test_comparing_a_piece_takes_little_memory(tmp_path: Path) -> None:
    remote = VersionedObject(bytes(6 << 20))
    loaded(opened(remote, tmp_path))
    entries(tmp_path)[0].touch()
    tracemalloc.start()
    try:
        source = opened(remote, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
    assert isinstance(source, CompleteFile)
    source.close()


def test_space_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(1, tmp_path)
    monkeypatch.setattr(defaults, "CACHE_FREE_BYTES", 1 << 60)
    assert "leaves no room" in note(load(2, tmp_path))
    assert is_complete(1, tmp_path)


def test_a_new_directory_is_private_and_tagged_and_an_existing_one_is_not_tagged(tmp_path: Path) -> None:
    load(1, tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    load(1, tmp_path / "old")
    assert not (tmp_path / "old" / "CACHEDIR.TAG").exists()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    assert "other users own the cache or may write to it" in note(load(1, tmp_path / "cache"))
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change owners")
def test_a_directory_or_file_of_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(0o700)
    os.chown(tmp_path / "cache", 1234, 1234)
    assert "other users own the cache" in note(load(1, tmp_path / "cache"))
    os.chown(tmp_path / "cache", 0, 0)
    load(1, tmp_path / "cache")
    os.chown(entries(tmp_path / "cache")[0], 1234, 1234)
    assert "belongs to another user" in note(load(1, tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
@pytest.mark.parametrize("suffix", ["", ".part"])
def test_nothing_is_written_through_a_link(tmp_path: Path, kind: str, suffix: str) -> None:
    load(1, tmp_path / "model")
    name = entries(tmp_path / "model")[0].name
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    cache = tmp_path / "cache"
    cache.mkdir(0o700)
    link = cache / f"{name}{suffix}"
    if kind == "hard":
        os.link(mine, link)
    else:
        link.symlink_to(mine)
    assert "not cached" in note(load(1, cache))
    assert mine.read_bytes() == b"mine"


def test_another_version_is_another_entry(tmp_path: Path) -> None:
    load(1, tmp_path)
    remote = VersionedObject(CONTENT, path=named(1).path)
    assert loaded(opened(remote, tmp_path)) == CONTENT
    assert len(entries(tmp_path)) == 2
    assert is_complete(1, tmp_path)
