"""Marks on files that are being read, and counts of their cached pages."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.benchmark.machine import make_cold
from sluice.sources.pages import FileWatch, cached_bytes, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks of open file descriptions are Linux's")

_MARK = """
import sys
from sluice.sources.pages import FileWatch
watch = FileWatch.open(sys.argv[1])
print(watch.others_read(), flush=True)
sys.stdin.read()
"""


def opened(path: Path) -> FileWatch:
    watch = FileWatch.open(str(path))
    assert watch is not None
    return watch


def test_processes_notice_each_other_until_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 4096)
    path.chmod(0o444)
    watch = opened(path)
    assert not watch.others_read()
    child = subprocess.Popen(
        [sys.executable, "-c", _MARK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        assert watch.others_read()
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert not watch.others_read()
    watch.close()
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("kind", ["LOCK_SH", "LOCK_EX"])
def test_a_lock_of_another_program_is_not_a_reader(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 4096)
    child = subprocess.Popen(
        [sys.executable, "-c", _WHOLE, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        watch = opened(path)
        assert not watch.others_read()
        watch.close()
        child.kill()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EAGAIN])
def test_files_are_read_without_marks_where_locks_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(number, "no locks")

    path = tmp_path / "f"
    path.write_bytes(b"x")
    monkeypatch.setattr("fcntl.fcntl", refuse)
    watch = opened(path)
    assert not watch.others_read()
    watch.close()


def test_a_lost_watch_closes_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    watch = opened(path)
    descriptor = watch._file.fileno()
    del watch
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


_WHOLE = """
import fcntl, sys
stream = open(sys.argv[1], "r+b")
fcntl.lockf(stream, getattr(fcntl, sys.argv[2]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_missing_file_is_not_watched(tmp_path: Path) -> None:
    assert FileWatch.open(str(tmp_path / "missing")) is None


@pytest.mark.parametrize("count", [cached_bytes, resident_bytes])
def test_pages_are_counted(tmp_path: Path, count: object) -> None:
    assert callable(count)
    path = tmp_path / "f"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as stream:
        if count(stream.fileno(), 0, 1 << 20) == 0:
            pytest.skip("the kernel does not count these pages")
        assert count(stream.fileno(), 0, 1 << 20) == 1 << 20
        assert count(stream.fileno(), 8192, 10_000) == 12288
        if make_cold(path):
            assert count(stream.fileno(), 0, 1 << 20) == 0
