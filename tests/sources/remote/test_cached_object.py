"""Objects with a cache entry: which requests are made, what is kept of them, and damaged blocks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice import _defaults as defaults
from sluice.sources.protocol import Source
from sluice.sources.remote.file import RemoteFile
from sluice.testing import check_source
from support.cached_objects import BLOCK, VersionedObject, content, entries, opened, read

CONTENT = content()


@pytest.fixture
def remote() -> VersionedObject:
    return VersionedObject(CONTENT)


def data_of(cache: Path) -> Path:
    return entries(cache)[0] / "model.bin"


def test_requests_are_extended_to_whole_blocks_which_are_then_read_from_the_cache(
    remote: VersionedObject, tmp_path: Path
) -> None:
    source = opened(remote, tmp_path)
    assert read(source, 2 * BLOCK + 10, BLOCK) == CONTENT[2 * BLOCK + 10 : 3 * BLOCK + 10]
    assert remote.requests == [(2 * BLOCK, 2 * BLOCK)]
    assert read(source, 2 * BLOCK, 2 * BLOCK) == CONTENT[2 * BLOCK : 4 * BLOCK]
    assert read(source, 3 * BLOCK + 7, 5) == CONTENT[3 * BLOCK + 7 : 3 * BLOCK + 12]
    assert len(remote.requests) == 1
    source.close()


def test_other_sources_of_the_same_version_read_what_is_present(remote: VersionedObject, tmp_path: Path) -> None:
    first = opened(remote, tmp_path)
    read(first, 2 * BLOCK, BLOCK)
    second = opened(remote, tmp_path)  # while the first is open
    assert read(second, 0, 4 * BLOCK) == CONTENT[: 4 * BLOCK]
    assert remote.requests == [(BLOCK, 3 * BLOCK)]  # the first block came with the opening request
    first.close()
    third = opened(remote, tmp_path)
    assert read(third, 10, 3 * BLOCK) == CONTENT[10 : 3 * BLOCK + 10]
    assert not remote.requests
    for source in (second, third):
        source.close()


def test_a_large_cached_part_divides_a_request(
    remote: VersionedObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "CACHE_GAP_BYTES", 2 * BLOCK)
    source = opened(remote, tmp_path)
    read(source, 3 * BLOCK, 2 * BLOCK)
    read(source, 8 * BLOCK, BLOCK)
    remote.requests.clear()
    assert read(source, BLOCK, 9 * BLOCK) == CONTENT[BLOCK : 10 * BLOCK]
    assert remote.requests == [(BLOCK, 2 * BLOCK), (5 * BLOCK, 5 * BLOCK)]
    source.close()


def test_a_lost_body_is_resumed_where_it_ended_and_its_blocks_are_kept(remote: VersionedObject, tmp_path: Path) -> None:
    source = opened(remote, tmp_path)
    remote.longest = BLOCK + 70
    assert read(source, BLOCK + 5, 4 * BLOCK) == CONTENT[BLOCK + 5 : 5 * BLOCK + 5]
    lost = BLOCK + 70
    assert remote.requests[:3] == [
        (BLOCK, 5 * BLOCK),
        (BLOCK + lost, 5 * BLOCK - lost),
        (BLOCK + 2 * lost, 5 * BLOCK - 2 * lost),
    ]
    remote.requests.clear()
    assert read(source, BLOCK, 4 * BLOCK) == CONTENT[BLOCK : 5 * BLOCK]
    assert not remote.requests
    source.close()


def test_a_damaged_block_is_requested_again(remote: VersionedObject, tmp_path: Path) -> None:
    source = opened(remote, tmp_path)
    read(source, 0, 4 * BLOCK)
    with data_of(tmp_path).open("r+b") as file:
        file.seek(2 * BLOCK + 99)
        file.write(b"torn")
    remote.requests.clear()
    assert read(source, 0, 4 * BLOCK) == CONTENT[: 4 * BLOCK]
    assert remote.requests == [(2 * BLOCK, BLOCK)]
    remote.requests.clear()
    assert read(source, 2 * BLOCK + 90, 20) == CONTENT[2 * BLOCK + 90 : 2 * BLOCK + 110]
    assert not remote.requests
    source.close()


def test_a_source_that_is_read_after_closing_requests_what_it_reads(remote: VersionedObject, tmp_path: Path) -> None:
    source = opened(remote, tmp_path)
    read(source, 0, 2 * BLOCK)
    source.close()
    assert read(source, 5, 100) == CONTENT[5:105]
    assert remote.requests[-1] == (5, 100)


@pytest.mark.parametrize("filled", ["empty", "partly", "complete"])
def test_the_protocol_of_sources(remote: VersionedObject, tmp_path: Path, filled: str) -> None:
    first = opened(remote, tmp_path)
    read(first, *{"empty": (0, 10), "partly": (3 * BLOCK, 9), "complete": (0, len(CONTENT))}[filled])
    first.close()
    check_source(lambda: opened(remote, tmp_path), CONTENT)


#: Functions of the system that the cache calls while an object is read.
CALLS = ("open", "pwrite", "pread", "preadv", "mkdir", "fdatasync", "utime", "truncate", "statvfs", "listdir", "rename")


def failing(name: str, at: int, number: int) -> Callable[..., object]:
    """Return a function of ``os`` that fails from its call ``at`` on."""
    right = getattr(os, name)
    calls = iter(range(1 << 30))

    def function(*args: object, **kwargs: object) -> object:
        if next(calls) >= at:
            raise OSError(number, os.strerror(number))
        return right(*args, **kwargs)

    return function


@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EACCES, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CALLS)
def test_a_disk_that_fails_at_any_call_does_not_change_what_is_read(
    remote: VersionedObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    noted = False
    for at in (0, 1, 2, 4, 7, 11):
        cache = tmp_path / str(at)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(name, at, number))
            source = opened(remote, cache)
            assert read(source, 7, 3 * BLOCK) == CONTENT[7 : 3 * BLOCK + 7]
            assert read(source, 0, len(CONTENT)) == CONTENT
            source.close()
            noted |= has_note(source)
        again = opened(remote, cache)
        assert read(again, 0, len(CONTENT)) == CONTENT
        again.close()
    assert noted or name == "rename"  # nothing is removed here


def has_note(source: Source) -> bool:
    return isinstance(source, RemoteFile) and source.note is not None
