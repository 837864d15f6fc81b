from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path

import pytest

from sluice.machine.processes import PeakMeter, read_memory, restart_peak
from support.waiting import wait_until

MIB = 1 << 20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the split by kind is read from /proc")


@linux_only
def test_a_transient_peak_is_not_missed() -> None:
    with PeakMeter() as meter:
        data = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        data.write(b"x" * 64 * MIB)
        data.close()
        with PeakMeter():  # as in a load: the record restarts
            pass
    # The bytes object to write is a second copy. The kernel sums its counters of a processor now and then.
    assert 63 * MIB <= meter.peaks.total_bytes <= 160 * MIB


@linux_only
def test_kinds_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 16 * MIB)
    with PeakMeter() as meter:
        meter.sample()
        shared = mmap.mmap(-1, 8 * MIB)
        shared[::4096] = b"x" * len(range(0, 8 * MIB, 4096))
        with (tmp_path / "f").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert mapped[::4096]
            wait_until(lambda: meter.peaks.file_bytes >= 15 * MIB, "the sampler has seen the mapped file")
        shared.close()
    assert meter.peaks.shmem_bytes >= 7 * MIB
    assert meter.peaks.file_bytes >= 15 * MIB


@linux_only
def test_growth_is_counted_from_the_start_of_the_block() -> None:
    kept = bytearray(os.urandom(32 * MIB))
    with PeakMeter() as meter:
        pass
    assert meter.peaks.total_bytes < 8 * MIB
    assert kept


def test_the_end_of_a_block_does_not_wait_for_the_next_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice._defaults.SAMPLE_SECONDS", threading.TIMEOUT_MAX)
    with PeakMeter() as meter:
        meter.sample()
    assert meter.peaks.total_bytes >= 0


@linux_only
def test_the_record_of_the_peak_restarts_at_the_present_size() -> None:
    memory = bytearray(b"x" * (64 * MIB))
    del memory
    assert restart_peak()
    now = read_memory()
    assert now.peak_bytes <= now.total_bytes + 16 * MIB
