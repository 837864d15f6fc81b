"""The sources of the package keep the protocol; headers are read in few pieces."""

from __future__ import annotations

import errno
import io
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._defaults import HEADER_PIECE_BYTES
from sluice._errors import TruncatedError
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source
from sluice.sources.ranges import MemoryFile
from sluice.sources.wrappers import ReadAhead, Section
from support.source_conformance import check_source
from support.sources import MemorySource, RecordedRead, RecordingSource
from support.system_calls import Injection, failing

CONTENT = random.Random(2).randbytes(5 * HEADER_PIECE_BYTES + 77)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "f.bin").write_bytes(CONTENT)
    os.utime(tmp_path / "f.bin", (1, 1))
    return tmp_path / "f.bin"


@contextmanager
def failing_reads() -> Iterator[None]:
    """Make every read of the system fail."""
    with pytest.MonkeyPatch.context() as patch:
        Injection(patch, failing(errno.EIO))
        yield


def rewrite(path: Path) -> Callable[[], object]:
    return lambda: path.write_bytes(CONTENT[::-1])


@pytest.mark.parametrize("wrap", [lambda source: source, ReadAhead, RecordingSource], ids=["file", "ahead", "recorded"])
def test_local_files_and_what_wraps_them(path: Path, wrap: Callable[[Source], Source]) -> None:
    check_source(lambda: wrap(LocalFile(path)), CONTENT, change=rewrite(path), failing=failing_reads)


def test_streams_in_memory() -> None:
    stream = io.BytesIO(CONTENT)
    check_source(lambda: MemoryFile(stream), CONTENT, change=lambda: stream.truncate(20_000))


@pytest.mark.parametrize("missing", ["preadv", "posix_fadvise", "O_DIRECT"])
def test_local_files_on_systems_with_fewer_features(path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delattr(os, missing)
    monkeypatch.setattr("sluice.sources.local._HAS_PREADV", missing != "preadv")
    check_source(lambda: LocalFile(path), CONTENT, change=rewrite(path))


def test_sections() -> None:
    around = MemorySource(bytes(100) + CONTENT + bytes(9))
    check_source(lambda: Section(around, 100, len(CONTENT)), CONTENT)
    known = [(0, CONTENT[:1000]), (len(CONTENT) - 500, CONTENT[-500:])]
    check_source(lambda: Section(around, 100, len(CONTENT), known=known), CONTENT)


def test_a_source_that_breaks_the_protocol_is_refused() -> None:
    class Short(MemorySource):
        def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
            return super().read_into(offset, buffer[:1000], direct=direct)

    with pytest.raises((AssertionError, TruncatedError)):
        check_source(lambda: Short(CONTENT), CONTENT)


@given(st.lists(st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 2 * HEADER_PIECE_BYTES)), max_size=12))
def test_any_reads_ahead_find_the_same_bytes(ranges: list[tuple[int, int]]) -> None:
    source = ReadAhead(MemorySource(CONTENT))
    for offset, nbytes in ranges:
        if offset + nbytes <= len(CONTENT):
            assert source.read_at(offset, nbytes) == CONTENT[offset : offset + nbytes]
        else:
            with pytest.raises(TruncatedError):
                source.read_at(offset, nbytes)


def test_what_was_read_along_is_not_read_again() -> None:
    recording = RecordingSource(MemorySource(CONTENT))
    source = ReadAhead(recording)
    end = len(CONTENT)
    for offset, nbytes in [(0, 8), (100, 30), (HEADER_PIECE_BYTES - 1, 1), (end - 22, 22), (end - 3000, 100), (5, 5)]:
        source.read_at(offset, nbytes)
    first, last = (RecordedRead(offset=at, nbytes=HEADER_PIECE_BYTES) for at in (0, end - HEADER_PIECE_BYTES))
    assert recording.reads == [first, last]


def test_large_reads_are_passed_on_unchanged() -> None:
    recording = RecordingSource(MemorySource(CONTENT))
    ReadAhead(recording).read_at(3, HEADER_PIECE_BYTES)
    assert recording.reads == [RecordedRead(offset=3, nbytes=HEADER_PIECE_BYTES)]


def test_little_is_kept() -> None:
    source = ReadAhead(MemorySource(bytes(1 << 20)))
    for offset in range(0, 1 << 20, HEADER_PIECE_BYTES):
        source.read_at(offset, 1)
    assert len(source._pieces) == 4
    source.forget(0, 1)
    assert not source._pieces
