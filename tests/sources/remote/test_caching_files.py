"""Files that pass through a cache: what is requested, what is kept, who downloads, and what happens to damage."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from sluice import _defaults as defaults
from sluice._errors import FormatError, SourceChangedError
from sluice._threads import Workers
from sluice.sources.descriptors import OwnedFile
from sluice.sources.protocol import checks_with_data
from sluice.sources.remote import cache_directory, caching
from sluice.sources.remote.caching import CachedFile, CompleteFile
from support.cached_objects import PIECE, VersionedObject, content, entries, filled, loaded, opened, parts, read
from support.source_conformance import check_source
from support.system_calls import failing
from support.watching import watch

CONTENT = content()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> VersionedObject:
    monkeypatch.setattr(defaults, "CACHE_PIECE_BYTES", PIECE)
    monkeypatch.setattr(caching, "_BUFFER_BYTES", PIECE - 1)
    return VersionedObject(CONTENT)


def partly(remote: VersionedObject, cache: Path, pieces: int) -> None:
    """Leave a part with some pieces, as a process that was killed does."""
    assert loaded(opened(remote, cache)) == CONTENT
    (file,) = entries(cache)
    with file.open("r+b") as data:
        data.truncate(len(CONTENT) + 8 * pieces)
    file.rename(file.with_suffix(".part"))


def test_the_first_load_requests_each_byte_once_and_the_next_is_local(remote: VersionedObject, tmp_path: Path) -> None:
    source = opened(remote, tmp_path)
    assert isinstance(source, CachedFile)
    assert loaded(source) == CONTENT
    assert sum(nbytes for _, nbytes in remote.requests) <= len(CONTENT)
    again = opened(remote, tmp_path)
    assert isinstance(again, CompleteFile)
    assert loaded(again) == CONTENT
    assert not remote.requests
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_nothing_is_downloaded_before_it_is_asked_for(remote: VersionedObject, tmp_path: Path) -> None:
    source = opened(remote, tmp_path / "cache")
    assert source.read_at(500_000, 9) == CONTENT[500_000:500_009]
    assert read(source, 500_000, 9) == CONTENT[500_000:500_009]
    assert remote.requests == [(500_000, 9)] * 2
    assert not (tmp_path / "cache").exists()
    source.close()


@pytest.mark.parametrize("damage", ["flipped", "shortened", "missing"])
def test_only_the_damaged_pieces_of_a_part_are_requested_again(
    remote: VersionedObject, tmp_path: Path, damage: str
) -> None:
    partly(remote, tmp_path, 6)
    (part,) = parts(tmp_path)
    data = bytearray(part.read_bytes())
    data[4 * PIECE + 5] ^= 1
    if damage == "flipped":
        part.write_bytes(data)
    elif damage == "shortened":
        os.truncate(part, 4 * PIECE + 5)
    else:
        part.unlink()
    arrived: list[int] = []
    assert loaded(filled(opened(remote, tmp_path), arrived.append)) == CONTENT
    assert sum(arrived) == len(CONTENT)
    again = {4} if damage == "flipped" else set(range(6))
    assert {offset // PIECE for offset, _ in remote.requests} == again | set(range(6, 11))
    assert entries(tmp_path)[0].read_bytes()[: len(CONTENT)] == CONTENT


@pytest.mark.parametrize("size", ["same", "longer", "shorter"])
def test_changes_of_a_complete_file_do_not_load(remote: VersionedObject, tmp_path: Path, size: str) -> None:
    loaded(opened(remote, tmp_path))
    (file,) = entries(tmp_path)
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[7 * PIECE] ^= size != "longer"
    file.write_bytes({"same": data, "longer": data + b"1", "shorter": data[:-1]}[size])
    os.utime(file, ns=(before.st_atime_ns - 60 * 10**9, before.st_mtime_ns))
    source = opened(remote, tmp_path)
    assert isinstance(source, CachedFile)
    assert loaded(source) == CONTENT
    assert {offset // PIECE for offset, _ in remote.requests} <= {7, 10}
    assert isinstance(opened(remote, tmp_path), CompleteFile)


def test_a_complete_file_that_was_only_touched_is_compared_once(
    remote: VersionedObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(opened(remote, tmp_path))
    entries(tmp_path)[0].touch()
    assert isinstance(opened(remote, tmp_path), CompleteFile)
    monkeypatch.setattr("sluice.sources.remote.cache_directory.CacheFile.right", None)
    assert isinstance(opened(remote, tmp_path), CompleteFile)


def test_threads_that_share_a_source_share_its_download(
    remote: VersionedObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(monkeypatch, CachedFile, "_download", lambda *_: time.sleep(0.1))
    monkeypatch.setattr(cache_directory, "_PATIENCE_SECONDS", -1.0)
    source = opened(remote, tmp_path)
    with Workers(2, "reader") as workers:
        for task in [workers.start(partial(filled, source)) for _ in range(2)]:
            task.result()
    assert getattr(source, "note", None) is None
    assert loaded(source) == CONTENT
    assert sum(nbytes for _, nbytes in remote.requests) <= len(CONTENT)


def test_a_progress_function_may_read_the_file_that_is_downloaded(remote: VersionedObject, tmp_path: Path) -> None:
    source = opened(remote, tmp_path)
    assert isinstance(source, CachedFile)

    def arrived(_: int) -> None:
        filled(source)
        assert read(source, 0, 8) == CONTENT[:8]

    source.fill(arrived)
    assert loaded(source) == CONTENT


def test_another_process_may_get_the_lock_of_a_part_that_is_being_published(
    remote: VersionedObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system drops the exclusive lock before it gives a shared one."""
    first, *others = [opened(remote, tmp_path) for _ in range(2)]

    def drop(file: OwnedFile, kind: int) -> None:
        if kind == fcntl.LOCK_SH and others:
            fcntl.flock(file, fcntl.LOCK_UN)
            assert loaded(others.pop()) == CONTENT

    watch(monkeypatch, cache_directory, "flock", drop)
    assert loaded(first) == CONTENT
    assert sum(nbytes for _, nbytes in remote.requests) <= len(CONTENT)


def test_a_process_that_waited_for_a_part_may_hold_it_for_a_moment(
    remote: VersionedObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [BlockingIOError()] * 3

    def refuse(_: OwnedFile, kind: int) -> None:
        if kind == fcntl.LOCK_SH | fcntl.LOCK_NB and refusals:
            raise refusals.pop()

    source = opened(remote, tmp_path)
    watch(monkeypatch, cache_directory, "flock", refuse)
    assert loaded(source) == CONTENT
    assert not refusals
    assert sum(nbytes for _, nbytes in remote.requests) <= len(CONTENT)


def test_a_part_that_a_stopped_process_writes_is_not_waited_for(
    remote: VersionedObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_directory._PATIENCE_SECONDS > defaults.REMOTE_PATIENCE_SECONDS  # it may wait for a server
    monkeypatch.setattr(cache_directory, "_PATIENCE_SECONDS", 0.1)
    partly(remote, tmp_path, 2)
    descriptor = os.open(parts(tmp_path)[0], os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    source = filled(opened(remote, tmp_path))
    assert read(source, 0, len(CONTENT)) == CONTENT
    assert "the process that fills it has written nothing for 0.1 s" in str(getattr(source, "note", None))
    os.close(descriptor)
    source.close()


def test_a_reader_continues_the_download_of_a_process_that_dies(remote: VersionedObject, tmp_path: Path) -> None:
    partly(remote, tmp_path, 2)
    descriptor = os.open(parts(tmp_path)[0], os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    death = threading.Timer(0.2, os.close, [descriptor])
    death.start()
    assert loaded(opened(remote, tmp_path)) == CONTENT
    death.join()
    assert isinstance(opened(remote, tmp_path), CompleteFile)


def test_an_object_that_is_replaced_during_a_download_is_an_error(remote: VersionedObject, tmp_path: Path) -> None:
    source = opened(remote, tmp_path)
    remote.content = content(seed=1)
    with pytest.raises(SourceChangedError):
        filled(source)
    source.close()
    assert not entries(tmp_path)


@pytest.mark.parametrize("pieces", [0, 11])
def test_headers_in_front_of_data_are_checked(remote: VersionedObject, tmp_path: Path, pieces: int) -> None:
    partly(remote, tmp_path, pieces)
    source = opened(remote, tmp_path)
    assert checks_with_data(source)
    source.expect(100, 10, 1000, Mock(side_effect=FormatError("refused")))
    with pytest.raises(FormatError, match="refused"):
        loaded(source)
    source.close()


@pytest.mark.parametrize("pieces", [0, 4, 11])
def test_the_protocol_of_sources(remote: VersionedObject, tmp_path: Path, pieces: int) -> None:
    partly(remote, tmp_path, pieces)
    check_source(lambda: opened(remote, tmp_path), CONTENT)
    check_source(lambda: filled(opened(remote, tmp_path)), CONTENT)


#: Functions of the system that the cache calls while an object is read.
CALLS = ("open", "pwrite", "write", "pread", "fdatasync", "fsync", "utime", "statvfs", "listdir", "rename")


@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EACCES, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CALLS)
def test_a_disk_that_fails_at_any_call_does_not_change_what_is_read(
    remote: VersionedObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    right, fail = getattr(os, name), failing(number)
    for at in (0, 1, 2, 4, 7, 11):
        calls = iter(range(1 << 30))

        def limited(*args: object, at: int = at, calls: Iterator[int] = calls, **more: object) -> object:
            return (fail if next(calls) >= at else right)(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, limited)
            source = opened(remote, tmp_path / str(at))
            filled(source)
            patch.setattr(os, name, right)
            assert read(source, 7, 3 * PIECE) == CONTENT[7 : 3 * PIECE + 7]
            assert read(source, 0, len(CONTENT)) == CONTENT
            source.check_unchanged()
            source.close()
        assert loaded(opened(remote, tmp_path / str(at))) == CONTENT
