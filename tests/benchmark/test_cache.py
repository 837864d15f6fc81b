"""Files are dropped from the page cache and brought into it, as the kernel reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.benchmark.cache import cached_share, make_cold, make_warm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in (("one", 1 << 20), ("two", 5000), ("empty", 0)):
        (tmp_path / name).write_bytes(b"x" * size)
    return tmp_path


def test_a_folder_is_dropped_from_the_cache_and_read_into_it(folder: Path) -> None:
    if not make_cold(folder):
        pytest.skip("this file system keeps its files in memory")
    assert cached_share(folder) == 0
    assert make_warm(folder)
    assert cached_share(folder) == 1


def test_the_share_counts_pages(folder: Path) -> None:
    if not make_cold(folder):
        pytest.skip("this file system keeps its files in memory")
    (folder / "two").read_bytes()
    assert cached_share(folder) == pytest.approx(2 / 258)


def test_a_file_that_stays_is_not_called_cold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.benchmark.cache._PAUSE_SECONDS", 0)
    monkeypatch.setattr("os.posix_fadvise", lambda *_: None)
    make_warm(folder)
    assert not make_cold(folder)


def test_what_is_warm_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_warm(folder)
    monkeypatch.setattr("sluice.benchmark.cache._READINGS", 1)
    monkeypatch.setattr("sluice.benchmark.cache._READ_BYTES", 0)  # a read would not bring pages into the cache
    assert make_warm(folder)
    assert not make_cold(folder) or not make_warm(folder)
