"""Local files: refusals before opening, failing and recovering reads, and files that change."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sluice._errors import (
    MissingFileError,
    ReadError,
    ReadPermissionError,
    SluiceError,
    SourceChangedError,
    TruncatedError,
    UnsupportedError,
)
from sluice.sources import local
from sluice.sources.local import LocalFile
from sluice.sources.protocol import DirectIOUnavailable
from support.leaks import open_files
from support.system_calls import Injection, failing, short

CONTENT = bytes(range(251)) * 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "x.pth").write_bytes(CONTENT)
    os.utime(tmp_path / "x.pth", (1, 1))  # long ago: a change within one tick of the clock is not visible
    return tmp_path / "x.pth"


@pytest.fixture
def source(path: Path) -> Iterator[LocalFile]:
    with closing(LocalFile(path)) as file:
        yield file


def refusal(path: Path | str) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        LocalFile(path)
    assert caught.value.file == str(path)
    return caught.value


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        ("x.pth/inside", ReadError, "cannot be examined"),
        ("none", FileNotFoundError, "does not exist"),
        ("broken", MissingFileError, "does not exist"),
        ("loop", ReadError, "cannot be examined"),
        ("a\0b", SluiceError, "not a valid path"),
        ("empty", TruncatedError, "empty"),
        (".", UnsupportedError, "a directory"),
    ],
)
def test_what_is_no_file(path: Path, name: str, kind: type[Exception], problem: str) -> None:
    for link, target in (("broken", "none"), ("loop", "loop")):
        path.with_name(link).symlink_to(target)
    path.with_name("empty").touch()
    error = refusal(f"{path.parent}/{name}")
    assert isinstance(error, kind)
    assert problem in error.problem
    if isinstance(error, FileNotFoundError):
        assert (error.errno, error.filename) == (errno.ENOENT, error.file)


def test_special_files_are_refused_without_being_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opening a FIFO would block for ever"))
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket")
        found = {name: refusal(name) for name in ("fifo", "socket", os.devnull)}
    assert {type(error) for error in found.values()} == {UnsupportedError}
    kinds = zip(found.values(), ("a FIFO", "a socket", "a character device"), strict=True)
    assert all(error.problem == f"this is {kind}, not a regular file" for error, kind in kinds)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOENT])
def test_a_file_that_cannot_be_opened(source: LocalFile, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "open", failing(number))
    for direct in (False, True):
        with pytest.raises(ReadError, match=os.strerror(number)) as caught:
            source.read_into(0, memoryview(bytearray(4096)), direct=direct)
        assert isinstance(caught.value.__cause__, OSError)
        assert (caught.value.errno, caught.value.strerror) == (number, os.strerror(number))
        assert isinstance(caught.value, PermissionError) == (number == errno.EACCES)
        assert type(caught.value) is (ReadPermissionError if number == errno.EACCES else ReadError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look at every file")
def test_a_directory_that_may_not_be_searched(path: Path) -> None:
    path.parent.chmod(0)
    try:
        assert isinstance(refusal(path), ReadError)
    finally:
        path.parent.chmod(0o700)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EINVAL])
def test_a_failed_read_names_the_offset(source: LocalFile, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    fail = failing(number)
    Injection(monkeypatch, lambda read, buffer, offset: fail() if offset >= 150 else read(buffer[:100]))
    with pytest.raises(ReadError, match=os.strerror(number)) as caught:
        source.read_at(50, 1000)
    assert (caught.value.file, caught.value.offset) == (source.path, 150)
    assert isinstance(caught.value.__cause__, OSError)


def test_an_early_end_of_an_unchanged_file_is_truncation(source: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    Injection(monkeypatch, lambda read, buffer, offset: 0 if offset else read(buffer[:9]))
    with pytest.raises(TruncatedError) as caught:
        source.read_at(0, 100)
    assert caught.value.found == "9 bytes"


def test_a_rewritten_file_whose_times_were_restored_has_changed(source: LocalFile, path: Path) -> None:
    """``tests/contracts/faults/test_changing_files`` has the other changes."""
    status = path.stat()
    while path.stat().st_ctime_ns == status.st_ctime_ns:  # which alone shows the change, in steps of the clock
        path.write_bytes(CONTENT[::-1])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(SourceChangedError) as caught:
        source.check_unchanged()
    assert caught.value.file == str(path)


@pytest.fixture
def aligned() -> Iterator[memoryview]:
    with mmap.mmap(-1, 8 * 4096) as mapping, memoryview(mapping) as view:
        yield view


def read_directly(source: LocalFile, buffer: memoryview) -> None:
    try:
        source.read_into(0, buffer, direct=True)
    except DirectIOUnavailable:
        pytest.skip("the file system of the temporary directory has no direct I/O")


def test_at_most_two_descriptors_none_before_the_first_read_and_none_after_close(
    path: Path, aligned: memoryview
) -> None:
    before = open_files()
    source = LocalFile(path)
    assert open_files() == before
    source.read_at(0, 10)
    source.read_at(10, 10)
    assert (open_files() - before)[source.path] == 1
    read_directly(source, aligned)
    read_directly(source, aligned)
    assert (open_files() - before)[source.path] == 2
    source.close()
    source.close()
    assert open_files() == before
    assert source.read_at(0, 10) == CONTENT[:10]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP], ids=["EINVAL", "EOPNOTSUPP"])
@pytest.mark.parametrize("when", ["opening", "reading"])
def test_direct_io_that_is_refused(
    source: LocalFile, aligned: memoryview, monkeypatch: pytest.MonkeyPatch, when: str, number: int
) -> None:
    real, flag = os.open, os.O_DIRECT

    def opened(path: str, flags: int) -> int:
        if flags & flag and when == "opening":
            raise OSError(number, os.strerror(number))
        return real(path, flags & ~flag)  # on any file system

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        Injection(patch, failing(number))
        with pytest.raises(DirectIOUnavailable):
            source.read_into(0, aligned, direct=True)
    assert source.read_at(0, 4) == CONTENT[:4]


@pytest.mark.parametrize(("most", "usable"), [(4096, True), (8192, True), (4000, False), (1, False)])
def test_short_direct_reads_continue_on_blocks_only(
    source: LocalFile, aligned: memoryview, monkeypatch: pytest.MonkeyPatch, most: int, usable: bool
) -> None:
    monkeypatch.setattr(os, "O_DIRECT", 0)  # every file system behaves the same
    Injection(monkeypatch, short(most))
    if usable:
        assert source.read_into(0, aligned, direct=True) == len(CONTENT)
        assert aligned[: len(CONTENT)] == CONTENT
    else:
        with pytest.raises(DirectIOUnavailable):
            source.read_into(0, aligned, direct=True)


def test_a_file_that_is_left_at_the_end_of_the_process_does_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LocalFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(local, "DESCRIPTORS", None)  # as the interpreter leaves globals
        file.__del__(lambda: True)
    file.close()


def test_a_relative_path_stays_the_same_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    with closing(LocalFile(path.name)) as source:
        monkeypatch.chdir("/")
        buffer = bytearray(10)
        source.read_into(0, memoryview(buffer))
    assert source.path == path.name
    assert buffer == path.read_bytes()[:10]
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(os, "access", lambda *_: False)  # a directory above may not be searched
    with closing(LocalFile(path.name)) as source:
        assert source.local_path == path.name
