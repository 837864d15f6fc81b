"""``sluice.measure``: memory by kind, peaks while the interpreter lock is held, and cleanup."""

from __future__ import annotations

import gc
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import sluice
from sluice.machine.processes import PeakMeter
from sluice.measuring import _meter, _sampler
from support.waiting import wait_until

MIB = 1 << 20

#: Tolerance in bytes: the kernel sums resident sizes per processor with a delay.
SLACK = 4 * MIB


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """Collect what earlier tests left: released inside a block, it would hide as much growth."""
    gc.collect()


def new_pages(nbytes: int) -> mmap.mmap:
    """Return new private memory with every page written; the heap may reuse up to 64 MiB that are resident already."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:: mmap.PAGESIZE] = b"\1" * (nbytes // mmap.PAGESIZE)
    return memory


def touch(nbytes: int) -> None:
    """Hold ``nbytes`` for some tenths of a second without releasing the interpreter lock."""
    held = new_pages(nbytes)
    for _ in range(20):
        held.find(b"\2")


def touch_until_sampled(nbytes: int, memory: _meter.Measurement) -> None:
    """Hold ``nbytes`` until the helper process has sampled: it sleeps after each sample, and the kernel counts that."""
    process = memory._helper._process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status")

    def sleeps() -> int:
        return int(status.read_text(encoding="ascii").split("\nvoluntary_ctxt_switches:")[1].split()[0])

    held = new_pages(nbytes)
    before = sleeps()
    while sleeps() < before + 2:
        held.find(b"\2")


def test_a_peak_while_the_interpreter_lock_is_held_is_measured() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)  # a sampling thread would not run
    try:
        with sluice.measure() as memory:
            touch_until_sampled(256 * MIB, memory)
    finally:
        sys.setswitchinterval(before)
    report = memory.report
    assert report.separate_process
    assert report.peaks.total_bytes >= 256 * MIB - SLACK
    assert report.peaks.anon_bytes >= 256 * MIB - SLACK
    assert report.final.total_bytes < 16 * MIB
    assert max(report.timeline.columns["anon"]) >= 256 * MIB - SLACK


@pytest.mark.parametrize("load", [nullcontext, PeakMeter])  # the meter restarts the kernel's record
def test_a_peak_between_two_samples_is_in_the_total(load: Callable[[], AbstractContextManager[object]]) -> None:
    with sluice.measure(interval_seconds=30) as memory:
        touch(128 * MIB)
        with load():
            pass
    assert memory.report.peaks.total_bytes >= 128 * MIB - SLACK
    assert len(memory.report.timeline) <= 3


def test_a_peak_before_the_block_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    touch(128 * MIB)
    start = _meter._Helper.start

    def start_slowly(*args: Any, **kwargs: Any) -> _meter._Helper:
        helper = start(*args, **kwargs)
        touch(96 * MIB)  # by another thread, on a busy machine: before the block, but in the helper's samples
        return helper

    monkeypatch.setattr(_meter._Helper, "start", start_slowly)
    with sluice.measure() as memory:
        touch(MIB)
    peaks = memory.report.peaks
    assert max(peaks.total_bytes, peaks.anon_bytes) < 48 * MIB


def test_kinds_are_distinguished(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(32 * MIB))
    with sluice.measure() as memory, path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        mapped.find(b"\1")
        memory.mark("mapped")
        mapped.close()
        shared = mmap.mmap(-1, 16 * MIB)
        shared.write(bytes(16 * MIB))
        memory.mark("shared")
        shared.close()
    peaks = memory.report.peaks
    assert peaks.file_bytes >= 32 * MIB - SLACK
    assert peaks.shmem_bytes >= 16 * MIB - SLACK
    first, second = memory.report.marks
    assert (first.name, second.name) == ("mapped", "shared")
    assert first.growth.file_bytes >= 32 * MIB - SLACK
    assert second.growth.file_bytes < 8 * MIB
    assert 0 < first.seconds < second.seconds < memory.report.seconds


def test_the_report_is_plain_data_rows_a_table_and_a_picture() -> None:
    with sluice.measure() as memory:
        touch(32 * MIB)
        memory.mark("done")
    report = memory.report
    assert json.loads(json.dumps(report.to_json()))["marks"][0]["name"] == "done"
    rows = list(report.timeline.rows())
    assert len(rows) == len(report.timeline) >= 2  # the helper samples at its start and at its end
    assert {"seconds", "anon_bytes", "file_bytes", "shmem_bytes", "peak_bytes"} <= rows[0].keys()
    assert [row[0] for row in report.lines()][:2] == ["host, total", "  anonymous"]
    assert report.table().row_count == len(list(report.lines())) + 1
    assert "host, total" in str(report)
    bundle = report._repr_mimebundle_([], [])  # in a notebook
    assert "<pre" in bundle["text/html"]
    assert "host, total" in bundle["text/plain"]
    pytest.importorskip("matplotlib")
    assert report.figure().axes[0].get_ylabel() == "growth of memory, GiB"


def test_reports_share_a_picture() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    panels = Figure().subplots(1, 2)
    for panel in panels:
        with sluice.measure() as memory:
            touch(8 * MIB)
            memory.mark("half")
        memory.report.draw(panel)
    assert [text.get_text() for panel in panels for text in panel.texts] == ["half", "half"]
    assert all(len(panel.collections) == 3 for panel in panels)


def test_the_report_is_there_after_the_block_and_an_exception_passes() -> None:
    memory = sluice.measure()
    with pytest.raises(RuntimeError, match="after the block has ended"), memory:
        _ = memory.report
    assert memory.report.seconds > 0


@pytest.mark.parametrize("interval", [0, -1.0, float("nan")])
def test_intervals_must_be_positive(interval: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        sluice.measure(interval_seconds=interval)


def test_a_function_is_measured_at_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    reports: list[sluice.MemoryReport] = []

    @sluice.measure(on_report=reports.append)
    def work(nbytes: int) -> int:
        touch(nbytes)
        return nbytes

    assert work(MIB) == MIB
    work(48 * MIB)
    assert len(reports) == 2
    assert reports[1].peaks.total_bytes >= 48 * MIB - SLACK
    sluice.measure()(touch)(MIB)
    assert "touch: peak growth of memory over" in capsys.readouterr().err
    with redirect_stderr(None):  # as where it is closed
        assert sluice.measure()(partial(len, ""))() == 0


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError("no more processes")))
    monkeypatch.setattr(_meter, "memory_groups", list)  # and no control groups


@pytest.mark.usefixtures("no_process")
def test_if_no_process_can_start_a_thread_samples() -> None:
    with sluice.measure() as memory:
        touch(64 * MIB)
    assert (memory.report.separate_process, memory.report.cgroup) == (False, None)
    assert memory.report.peaks.total_bytes >= 64 * MIB - SLACK


@pytest.mark.usefixtures("no_process")
def test_a_thread_with_a_long_interval_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    sleep = time.sleep

    def nap(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            naps.append(seconds)
        sleep(min(seconds, 0.01))

    monkeypatch.setattr(time, "sleep", nap)
    with sluice.measure(interval_seconds=60):
        wait_until(lambda: len(naps) > 2, "the thread has slept")
    assert max(naps) <= _meter._NOTICE_SECONDS


def test_a_helper_that_was_killed_costs_the_timeline_only() -> None:
    with sluice.measure() as memory:
        process = memory._helper._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        touch(64 * MIB)
        memory.mark("after")
    assert memory.report.peaks.total_bytes >= 64 * MIB - SLACK
    assert memory.report.peaks.anon_bytes >= memory.report.marks[0].growth.anon_bytes
    assert len(memory.report.timeline) == 0


def test_the_helper_ends_with_the_process_that_started_it() -> None:
    code = (
        "import sluice, os; m = sluice.measure(); m.__enter__(); print(m._helper._process.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    helper = Path(f"/proc/{done.stdout.strip()}/stat")

    def ended() -> bool:
        try:
            return helper.read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until(ended, "the helper has ended")


def test_accelerators_in_use_are_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake torch with one device whose allocator grew."""
    used = [5 * MIB]
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        reset_peak_memory_stats=lambda _: None,
        memory_allocated=lambda _: used[-1],
        memory_reserved=lambda _: used[-1] + MIB,
        max_memory_allocated=lambda _: 20 * MIB,
        max_memory_reserved=lambda _: 24 * MIB,
    )
    accelerator = SimpleNamespace(current_accelerator=lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=accelerator, cuda=cuda))
    with sluice.measure() as memory:
        used.append(9 * MIB)
        memory.mark("half")
    [device] = memory.report.devices
    assert (device.device, device.allocated_bytes, device.reserved_bytes) == ("cuda:0", 15 * MIB, 18 * MIB)
    assert device.final_bytes == 4 * MIB
    assert memory.report.marks[0].allocated_bytes == {"cuda:0": 9 * MIB}
    assert "cuda:0 reserved" in [row[0] for row in memory.report.lines()]
    cuda.is_initialized = lambda: False
    assert _meter.DeviceMeter().growth() == ()


def test_neighbours_are_joined_by_their_larger_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sampler, "MOST_SAMPLES", 64)
    sampler = _sampler.Sampler(os.getpid(), cgroup="")
    for _ in range(64):
        sampler.take()
    assert len(sampler.columns["time_ns"]) == 32
    sampler.columns["anon"][:] = array("q", [3, 7, 8])
    sampler.thin()
    sampler.close()
    assert list(sampler.columns["anon"]) == [7, 8]
