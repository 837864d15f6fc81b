"""Reads whose bytes are kept in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.engine.host_memory import HostMemory
from sluice.records import Read
from sluice.sources.local import LocalFile
from sluice.sources.protocol import DirectIOUnavailable
from sluice.streaming.host_weights import HostWeights, resting_bytes
from support.sources import RecordingSource

CONTENT = bytes(range(251)) * 200


def read(offset: int, nbytes: int) -> Read:
    return Read(file=0, offset=offset, nbytes=nbytes, methods=("direct", "buffered"))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[RecordingSource]:
    (tmp_path / "f").write_bytes(CONTENT)
    recorded = RecordingSource(LocalFile(tmp_path / "f"))
    yield recorded
    recorded.close()


def test_a_kept_read_reaches_the_file_once(source: RecordingSource) -> None:
    host = HostWeights([source], [read(100, 5_000)], huge_pages=False)
    for _ in range(3):
        assert found(host, 100, 5_000) == CONTENT[100:5_100]
        assert found(host, 9_000, 10) == CONTENT[9_000:9_010]
    assert [each.offset for each in source.reads] == [100, 9_000, 9_000, 9_000]
    assert host.served_bytes == 10_000
    host.clear()
    assert found(host, 100, 5_000) == CONTENT[100:5_100]


def test_whole_blocks_serve_a_direct_read_and_the_buffered_one_inside(source: RecordingSource) -> None:
    """The last block of the file is shorter."""
    last = len(CONTENT) - 1_000
    host = HostWeights([source], [read(last, 1_000)], huge_pages=False)
    assert resting_bytes([read(last, 1_000)]) == 4_096
    first = last // 4_096 * 4_096
    for _ in range(2):
        buffer = HostMemory(4_096, huge_pages=False).view()
        try:
            nbytes = host.sources[0].read_into(first, buffer, direct=True)
        except DirectIOUnavailable:
            pytest.skip("this file system has no direct I/O")
        assert bytes(buffer[:nbytes]) == CONTENT[first:]
    assert found(host, last, 1_000) == CONTENT[last:]
    assert len(source.reads) == 1


def found(host: HostWeights, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    assert host.sources[0].read_into(offset, memoryview(data)) == nbytes
    return bytes(data)
