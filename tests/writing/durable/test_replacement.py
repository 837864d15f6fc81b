"""Files are replaced atomically: faults at every system call, kills, links, modes, other writers."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import sluice
from sluice.writing.durable.replacement import Replacement

NEW = b"new" * 1000


def write(path: Path, content: bytes = NEW, *, overwrite: bool = True) -> None:
    with Replacement(path, overwrite=overwrite) as file:
        file.reserve(len(content) + 100)
        file.write_at(10, content[10:])
        file.write_at(0, content[:10])
        file.commit(nbytes=len(content))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_new_file_and_its_replacement(tmp_path: Path) -> None:
    write(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == NEW
    write(tmp_path / "f", b"0123456789abc")
    assert (tmp_path / "f").read_bytes() == b"0123456789abc"
    assert names(tmp_path) == ["f"]


def test_nothing_happens_without_a_commit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with Replacement(tmp_path / "f", overwrite=True) as file:
        file.write_at(0, b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


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


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b").write_bytes(b"old")
    (tmp_path / "link").symlink_to("blobs/b")
    (tmp_path / "dangling").symlink_to("blobs/c")
    write(tmp_path / "link")
    write(tmp_path / "dangling")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "blobs" / "b").read_bytes() == NEW
    assert (tmp_path / "blobs" / "c").read_bytes() == NEW


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.mkdir(), "a directory"),
        (os.mkfifo, "a FIFO"),
        (lambda path: path.symlink_to(path), "a circular symbolic link"),
    ],
)
def test_special_files_are_refused(tmp_path: Path, make: Callable[[Path], None], kind: str) -> None:
    make(tmp_path / "f")
    with pytest.raises(sluice.SaveError, match=f"only a regular file can be replaced; found {kind}"):
        Replacement(tmp_path / "f", overwrite=True)
    with pytest.raises(sluice.SaveError, match="found a device"):
        Replacement("/dev/null", overwrite=True)


def test_places_that_cannot_be_written_are_typed(tmp_path: Path) -> None:
    with pytest.raises(sluice.SaveError, match="No such file or directory"):
        write(tmp_path / "no" / "f")
    with pytest.raises(sluice.SaveError, match="File name too long"):
        write(tmp_path / ("x" * 256))


def test_the_longest_name_works(tmp_path: Path) -> None:
    write(tmp_path / ("ü" * 127 + "x"))
    assert names(tmp_path) == ["ü" * 127 + "x"]


CALLS = ("open", "posix_fallocate", "pwrite", "ftruncate", "fchmod", "fsync", "replace", "link")


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_the_kth_system_call_fails_for_every_k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, overwrite: bool
) -> None:
    target = tmp_path / "f"
    calls = failing = 0

    def counting(name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def counted(*args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(error, os.strerror(error))
            return real(*args, **options)

        return counted

    for name in CALLS:
        monkeypatch.setattr(os, name, counting(name))
    while True:
        if overwrite:
            target.write_bytes(b"old")
        failing, calls = failing + 1, 0
        before = names(tmp_path)
        try:
            write(target, overwrite=overwrite)
        except sluice.SaveError as refused:
            assert os.strerror(error) in str(refused)
            if target.exists() and target.read_bytes() == NEW:
                assert calls > 6  # only the directory's sync, after the rename
                target.unlink()
                continue
            assert names(tmp_path) == before
            continue
        break
    assert failing > 7
    assert target.read_bytes() == NEW


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


KILLED = """
import sys
from sluice.writing.durable.replacement import Replacement
print("ready", flush=True)
number = 0
while True:
    number += 1
    content = bytes([number % 256]) * 20_000
    with Replacement(sys.argv[1], overwrite=True) as file:
        file.reserve(len(content))
        for start in range(0, len(content), 1000):
            file.write_at(start, content[start : start + 1000])
        file.commit()
"""


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.long)])
def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path, kills: int) -> None:
    target = tmp_path / "f"
    target.write_bytes(b"\0" * 20_000)
    for number in range(kills):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE)
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.001 * (number * 7 % 23))
            process.send_signal(signal.SIGKILL)
        content = target.read_bytes()
        assert len(content) == 20_000
        assert len(set(content)) == 1
    write(target)
    assert names(tmp_path) == ["f"]
