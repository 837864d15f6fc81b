"""The sources of the package keep the protocol."""

from __future__ import annotations

import errno
import io
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice._errors import TruncatedError
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source
from sluice.sources.ranges import MemoryFile
from sluice.sources.wrappers import ReadAhead, Section
from support.fault_injection import Injection, failing
from support.recorded_reads import RecordingSource
from support.source_conformance import check_source
from support.sources import FaultySource, MemorySource

CONTENT = random.Random(1).randbytes(30_000)


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


@pytest.mark.parametrize(
    "wrap",
    [lambda source: source, ReadAhead, RecordingSource, lambda source: FaultySource(source, at=1 << 60)],
    ids=["LocalFile", "ReadAhead", "RecordingSource", "FaultySource"],
)
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


def test_memory() -> None:
    check_source(lambda: MemorySource(CONTENT), CONTENT)


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
