"""Locks of a cache directory, between processes and between descriptors of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sluice.sources.remote import cache_locks
from sluice.sources.remote.cache_locks import CacheLocks
from support.leaks import open_files

KEY, OTHER = "a" * 64, "b" * 64

HOLD = """
import sys
from sluice.sources.remote.cache_locks import CacheLocks
locks = CacheLocks(sys.argv[1])
with locks.state():
    locks.use(sys.argv[2])
    print("held", flush=True)
    sys.stdin.readline()
print("used", flush=True)
sys.stdin.readline()
"""


def test_use_is_counted_and_needs_one_descriptor(tmp_path: Path) -> None:
    locks, other = CacheLocks(str(tmp_path / "lock")), CacheLocks(str(tmp_path / "lock"))
    before = open_files()
    with locks.state():
        for key in (KEY, KEY, OTHER):
            locks.use(key)
    assert (open_files() - before).total() == 1
    for expected in (True, False):
        locks.release(KEY)
        with other.state() as state:
            assert state.in_use(KEY) is expected
            assert state.in_use(OTHER)
    locks.release(OTHER)
    assert open_files() == before


def test_another_process_is_noticed_until_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = CacheLocks(str(tmp_path / "lock"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock"), KEY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        monkeypatch.setattr(cache_locks, "_PATIENCE_SECONDS", 0.01)
        with pytest.raises(TimeoutError, match="locked"), locks.state():
            pass
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        with locks.state() as state:
            assert state.in_use(KEY)
            assert not state.in_use(OTHER)
        process.kill()
        process.wait()
    with locks.state() as state:
        assert not state.in_use(KEY)
