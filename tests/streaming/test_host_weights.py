"""Reads whose bytes are kept in host memory, and streams to an accelerator whose weights rest there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sluice
from sluice import _defaults as defaults
from sluice._errors import BudgetError
from sluice._options import MemoryLimits
from sluice.benchmark.machine import make_cold
from sluice.engine.host_memory import HostMemory
from sluice.records import DeviceFacts, Read
from sluice.sources.local import LocalFile
from sluice.sources.protocol import DirectIOUnavailable
from sluice.streaming.host_weights import HostWeights, resting_bytes
from support.fake_accelerator import FakeAccelerator
from support.sources import RecordingSource, record_reads
from support.streamed_models import IDS, Layers, block_bytes

MIB = 1 << 20

CONTENT = bytes(range(251)) * 200


def read(offset: int, nbytes: int) -> Read:
    return Read(file=0, offset=offset, nbytes=nbytes, methods=("direct", "buffered"))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[RecordingSource]:
    (tmp_path / "f").write_bytes(CONTENT)
    recorded = RecordingSource(LocalFile(tmp_path / "f"))
    yield recorded
    recorded.close()


def test_a_kept_read_reaches_the_file_once(source: RecordingSource, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostWeights([source], [read(100, 5_000)], huge_pages=False)
    with monkeypatch.context() as patch:
        patch.setattr("sluice.streaming.host_weights._copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            found(host, 100, 5_000)
    for _ in range(3):
        assert found(host, 100, 5_000) == CONTENT[100:5_100]
        assert found(host, 9_000, 10) == CONTENT[9_000:9_010]
    assert [each.offset for each in source.reads] == [100, 100, 9_000, 9_000, 9_000]
    assert host.missing_bytes([read(100, 5_000), read(9_000, 10)]) == 10
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


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sluice.loading.devices.device_name", str)
    monkeypatch.setattr("sluice.reading.transfer.device_facts", lambda device: DeviceFacts(device=device))
    monkeypatch.setattr("sluice.engine.targets.accelerator", lambda _: FakeAccelerator())
    return "fake:0"


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("page_cache", ["cold", "cached"])
def test_weights_of_an_accelerator_rest_in_host_memory(
    file: Path, model: Layers, running: Layers, fake_device: str, page_cache: str
) -> None:
    """The second call reads from the file only what has no room, and the same bits."""
    memory = MemoryLimits(
        device=3 * block_bytes(), host=(64 << 20) + defaults.OVERHEAD_BYTES + 2 * block_bytes() + 8192
    )
    planned = sluice.plan(running, file, memory=memory, device=fake_device, stream=True).stream
    if page_cache == "cold":
        make_cold(file)
    calls: list[int] = []
    with sluice.open(file) as checkpoint:
        (recorded,) = record_reads(checkpoint)
        with sluice.stream(running, checkpoint, memory=memory, device=fake_device) as stream:
            for _ in range(5):
                recorded.reads.clear()
                assert torch.equal(running(IDS), model(IDS))
                calls.append(sum(each.nbytes for each in recorded.reads))
            report = stream.report
    assert planned is not None
    assert (planned.host_bytes, planned.call_bytes) == (report.host_bytes, report.call_bytes)
    assert 0 < report.host_bytes <= 2 * block_bytes()
    # Direct reads are of whole blocks, and up to two weights are read ahead for the next call.
    assert sum(calls[1:]) <= 4 * (report.call_bytes + 16 * defaults.BLOCK_BYTES) + 2 * MIB
    assert calls[0] >= report.call_bytes + report.host_bytes
    assert "rest in host memory" in str(report)
    assert report.device == fake_device
    with pytest.raises(BudgetError, match="free memory of fake:0 is unknown"):
        sluice.stream(running, file, device=fake_device)
