"""Marks on files that are being read, and counts of their cached pages."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice.benchmark.machine import make_cold
from sluice.sources.pages import FileWatch, cached_bytes, resident_bytes
from support.system_calls import failing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks of open file descriptions are Linux's")

_MARK = """
import sys
from sluice.sources.pages import FileWatch
watch = FileWatch.open(sys.argv[1])
print(watch.others_read(), flush=True)
sys.stdin.read()
"""


#: Locks a whole file.
_WHOLE = """
import fcntl, sys
stream = open(sys.argv[1], "r+b")
fcntl.lockf(stream, getattr(fcntl, sys.argv[2]))
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(b"x" * 4096)
    return tmp_path / "f"


@contextmanager
def child(code: str, *arguments: object, says: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program that waits after its first line."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{says}\n"
        yield process
        process.kill()


def opened(path: Path) -> FileWatch:
    watch = FileWatch.open(str(path))
    assert watch is not None
    return watch


def test_processes_notice_each_other_until_one_is_killed(path: Path) -> None:
    path.chmod(0o444)
    watch = opened(path)
    assert not watch.others_read()
    with child(_MARK, path, says="True") as process:
        assert watch.others_read()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not watch.others_read()
    watch.close()
    assert os.listdir(path.parent) == ["f"]


@pytest.mark.parametrize("kind", ["LOCK_SH", "LOCK_EX"])
def test_a_lock_of_another_program_is_not_a_reader(path: Path, kind: str) -> None:
    with child(_WHOLE, path, kind, says="locked"):
        watch = opened(path)
        assert not watch.others_read()
        watch.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EAGAIN])
def test_files_are_read_without_marks_where_locks_fail(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("fcntl.fcntl", failing(number))
    watch = opened(path)
    assert not watch.others_read()
    watch.close()


def test_a_lost_watch_closes_its_descriptor(path: Path) -> None:
    opened(path)  # the test fails if a descriptor remains


def test_a_missing_file_is_not_watched(tmp_path: Path) -> None:
    assert FileWatch.open(str(tmp_path / "missing")) is None


@pytest.mark.parametrize("count", [cached_bytes, resident_bytes])
def test_pages_are_counted(path: Path, count: Callable[[int, int, int], int]) -> None:
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as stream:
        if count(stream.fileno(), 0, 1 << 20) == 0:
            pytest.skip("the kernel does not count these pages")
        assert count(stream.fileno(), 0, 1 << 20) == 1 << 20
        assert count(stream.fileno(), 8192, 10_000) == 12288
        if make_cold(path):
            assert count(stream.fileno(), 0, 1 << 20) == 0
