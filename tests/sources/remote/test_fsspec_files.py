"""Files of fsspec are sources: ranges in pieces, one request at a time without asyncio, changes noticed at the end."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from sluice import _defaults as defaults
from sluice._errors import (
    MissingFileError,
    PathEscapeError,
    RemoteError,
    SourceChangedError,
    TruncatedError,
    UnsupportedError,
)
from sluice._threads import in_threads
from sluice.sources.remote.fsspec_files import open_directory, open_source
from sluice.sources.remote.location import Remote
from support.source_conformance import check_source
from support.watching import watch

CONTENT = random.Random(0).randbytes(200_000)


def test_a_file_is_a_source(filesystem: Any) -> None:
    filesystem.pipe_file("/d/f", CONTENT)
    check_source(
        lambda: open_source(Remote("memory://d/f")), CONTENT, change=lambda: filesystem.pipe_file("/d/f", CONTENT[::-1])
    )


def test_a_range_is_read_in_pieces(filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is memory in addition to the target."""
    filesystem.pipe_file("/f", CONTENT)
    monkeypatch.setattr(defaults, "FSSPEC_READ_BYTES", 4096)
    monkeypatch.setattr(defaults, "REMOTE_FIRST_BYTES", 1000)
    asked: list[tuple[int, int]] = []
    watch(monkeypatch, filesystem, "cat_file", lambda _, start, end: asked.append((start, end)))
    source = open_source(Remote("/f", store=filesystem))
    assert source.read_at(100_000, 10_000) == CONTENT[100_000:110_000]
    assert asked == [(0, 1000), (100_000, 104_096), (104_096, 108_192), (108_192, 110_000)]


def test_a_file_system_without_asyncio_takes_one_request_at_a_time(
    filesystem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem.pipe_file("/f", CONTENT)
    inside, cat_file = [0, 0], filesystem.cat_file
    waiting = threading.Barrier(2)

    def counted(path: str, start: int, end: int) -> Any:
        inside[0] += 1
        inside[1] = max(inside)
        try:
            return cat_file(path, start=start, end=end)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(defaults, "REMOTE_FIRST_BYTES", 1)
    monkeypatch.setattr(filesystem, "cat_file", counted)
    sources = [open_source(Remote("/f", store=filesystem)), open_source(Remote("memory://f"))]
    assert {source.access.parallel_requests for source in sources} == {1}

    def read(number: int) -> None:
        waiting.wait()
        for _ in range(200):
            sources[number].read_at(10, 10)

    in_threads(read, 2, threads=2, name="reader")
    assert inside == [0, 1]


def test_a_replaced_or_removed_file_has_changed(filesystem: Any) -> None:
    filesystem.pipe_file("/f", CONTENT)
    source = open_source(Remote("memory://f"))
    source.check_unchanged()
    filesystem.pipe_file("/f", CONTENT)
    with pytest.raises(SourceChangedError, match="was changed while it was being read"):
        source.check_unchanged()
    filesystem.rm_file("/f")
    with pytest.raises(SourceChangedError, match="was removed"):
        source.check_unchanged()


def test_failed_requests_are_repeated_and_given_up(filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem.pipe_file("/f", CONTENT)
    monkeypatch.setattr(defaults, "REMOTE_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(defaults, "REMOTE_FIRST_BYTES", 1)
    monkeypatch.setattr(defaults, "REMOTE_FIRST_PAUSE", 0.0)
    with closing(open_source(Remote("memory://f"))) as source:
        with _failing(filesystem, ConnectionError("secret"), times=2):
            assert source.read_at(5, 5) == CONTENT[5:10]
        with _failing(filesystem, ConnectionError("secret")), pytest.raises(RemoteError) as caught:
            source.read_at(5, 5)
        assert str(caught.value).startswith("memory://f, byte 5: the file system failed (ConnectionError) after ")
        assert "secret" not in str(caught.value)
        for error in (PermissionError("no"), AttributeError("no"), RuntimeError("no")):
            with _failing(filesystem, error) as calls, pytest.raises(RemoteError):
                source.read_at(5, 5)
            assert len(calls) == 1


def test_a_file_system_with_an_event_loop_is_refused_after_a_fork(
    filesystem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem.pipe_file("/f", CONTENT)
    monkeypatch.setattr(filesystem, "async_impl", True, raising=False)
    with closing(open_source(Remote("/f", store=filesystem))) as source, monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        with pytest.raises(UnsupportedError, match=r"that was forked .* Start processes with 'spawn'"):
            source.read_at(len(CONTENT) - 1, 1)


def test_answers_that_are_not_the_range_are_refused(filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem.pipe_file("/f", CONTENT)
    monkeypatch.setattr(defaults, "REMOTE_FIRST_BYTES", 1)
    source = open_source(Remote("memory://f"))
    monkeypatch.setattr(filesystem, "cat_file", lambda *_, **__: CONTENT)
    with pytest.raises(RemoteError, match="other bytes than the range"):
        source.read_at(5, 5)


def test_files_that_are_not_there(filesystem: Any) -> None:
    filesystem.pipe_file("/d/empty", b"")
    with pytest.raises(MissingFileError, match="memory://d/none: there is no such file"):
        open_source(Remote("memory://d/none"))
    with pytest.raises(MissingFileError, match="a directory, not a file"):
        open_source(Remote("memory://d"))
    with pytest.raises(TruncatedError, match="the file is empty"):
        open_source(Remote("memory://d/empty"))
    with pytest.raises(MissingFileError):
        open_source(Remote("zip://inside::memory://none.zip"))


def test_directories_list_and_open_their_files(filesystem: Any) -> None:
    filesystem.pipe_file("/d/f", CONTENT)
    filesystem.pipe_file("/d/sub/g", b"x")
    for directory in (open_directory(Remote("memory://d/")), open_directory(Remote("/d", store=filesystem))):
        assert directory is not None
        assert {entry.name: entry.kind for entry in directory.entries()} == {"f": "file", "sub": "directory"}
        assert directory.open("sub/g").read_at(0, 1) == b"x"
        assert directory.open("f").path.endswith("/d/f")
        with pytest.raises(PathEscapeError):
            directory.open("../e")
    assert open_directory(Remote("memory://d/f")) is None
    assert open_directory(Remote("memory://none")) is None


def test_unknown_schemes_and_settings_are_refused(filesystem: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"nope://host/f: fsspec has no file system for 'nope'"):
        open_source(Remote("nope://me:secret@host/f"))
    with pytest.raises(UnsupportedError, match=r"headers=, verify=, cert= and timeout= are for http and object stores"):
        open_source(Remote("memory://f", timeout=3.0))


@contextmanager
def _failing(filesystem: Any, error: Exception, times: int = 1 << 30) -> Iterator[list[str]]:
    calls: list[str] = []

    def fail(path: str, **_: object) -> None:
        calls.append(path)
        if len(calls) <= times:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, filesystem, "cat_file", fail)
        yield calls
