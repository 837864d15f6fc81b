"""``sluice.measure``: memory of this process during a block, sampled by a helper process, and of torch's allocators."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, Self, TypeVar

from sluice._public import public
from sluice._threads import Worker, join_threads, start_threads
from sluice.machine.cgroups import MemoryGroup, memory_groups, tightest
from sluice.machine.processes import BEFORE_RESTART, NO_MEMORY, MemorySample, read_memory, restart_peak
from sluice.measuring import _sampler
from sluice.measuring._report import CgroupReport, DeviceReport, Mark, MemoryReport, Timeline
from sluice.records import Peaks

__all__ = ["DeviceMeter", "Measurement", "measure"]

P = ParamSpec("P")
R = TypeVar("R")

#: Longest sleep of the sampling thread, used if no helper process can be started, in seconds.
_NOTICE_SECONDS = 0.02


@public()
def measure(
    *, interval_seconds: float = 0.001, on_report: Callable[[MemoryReport], object] | None = None
) -> Measurement:
    """Measure memory during a ``with`` block or a function: host by kind, control group, accelerators.

    A helper process takes the samples, so that code that holds the interpreter lock cannot hide a peak. The peak of the
    total is exact: the kernel records it, and the record is restarted when the block begins. The code in the block is
    not traced or patched; forked children are not counted.

    Args:
        interval_seconds: Time between two samples.
        on_report: Called with the report when the block ends. A decorated function without it prints its report to
            standard error.

    Returns:
        A context manager with ``mark(name)`` and, after the block, ``report``; also a decorator.

    Raises:
        ValueError: ``interval_seconds`` is not positive.

    Example:
        >>> import sluice
        >>> with sluice.measure() as memory:
        ...     data = bytearray(256 << 20)
        ...     memory.mark("allocated")
        >>> memory.report.peaks.total_bytes > 128 << 20
        True
    """
    if not interval_seconds > 0:
        raise ValueError(f"interval_seconds must be positive, not {interval_seconds}")
    return Measurement(interval_seconds, on_report=on_report)


@public("sluice.measuring")
class Measurement:
    """One measurement; see ``measure``."""

    def __init__(self, interval_seconds: float, *, on_report: Callable[[MemoryReport], object] | None) -> None:
        self._interval = interval_seconds
        self._on_report = on_report
        self._marks: list[Mark] = []
        self._marked: list[MemorySample] = []
        self._report: MemoryReport | None = None

    @property
    def report(self) -> MemoryReport:
        """The report of the last block.

        Raises:
            RuntimeError: The block has not ended.
        """
        if self._report is None:
            raise RuntimeError("the report is available after the block has ended")
        return self._report

    def __enter__(self) -> Self:
        self._marks.clear()
        self._marked.clear()
        self._report = None
        self._devices = DeviceMeter()
        self._group = tightest(memory_groups())
        # Before, so that the helper's first samples exclude earlier peaks; and after, to exclude the helper's start.
        restart_peak()
        self._helper = _Helper.start(self._interval, group=self._group)
        restart_peak()
        self._begin_ns, self._start = time.monotonic_ns(), read_memory()
        BEFORE_RESTART.add(self._take)  # by a load in the block
        return self

    def mark(self, name: str) -> None:
        """Record the current memory under a name."""
        self._take()
        self._marks.append(
            Mark(
                name=name,
                seconds=(time.monotonic_ns() - self._begin_ns) / 1e9,
                growth=self._marked[-1].growth(self._start),
                allocated_bytes=self._devices.allocated(),
            )
        )

    def _take(self) -> None:
        self._marked.append(read_memory())

    def __exit__(self, *_: object) -> None:
        BEFORE_RESTART.discard(self._take)
        end, end_ns = read_memory(), time.monotonic_ns()
        self._report = self._assemble(end, end_ns, self._helper.stop())
        if self._on_report:
            self._on_report(self._report)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Measure each call of ``function``."""

        @functools.wraps(function)
        def measured(*args: P.args, **kwargs: P.kwargs) -> R:
            report = self._on_report or functools.partial(_print, getattr(function, "__qualname__", repr(function)))
            with Measurement(self._interval, on_report=report):
                return function(*args, **kwargs)

        return measured

    def _assemble(self, end: MemorySample, end_ns: int, columns: dict[str, array[int]]) -> MemoryReport:
        times, start = columns.pop("time_ns"), self._start
        return MemoryReport(
            seconds=(end_ns - self._begin_ns) / 1e9,
            interval_seconds=self._interval,
            separate_process=self._helper.separate,
            start=start.growth(NO_MEMORY),
            peaks=_peaks(start, [*self._marked, end], columns, bisect_left(times, self._begin_ns)),
            final=end.growth(start),
            cgroup=_cgroup(self._group, columns),
            devices=self._devices.growth(),
            marks=tuple(self._marks),
            timeline=Timeline(seconds=array("d", [(t - self._begin_ns) / 1e9 for t in times]), columns=columns),
        )


def _print(name: str, report: MemoryReport) -> None:
    with suppress(AttributeError, OSError, ValueError):  # stderr is None or closed, or its reader is gone
        sys.stderr.write(f"{name}: {report}\n")


def _peaks(start: MemorySample, readings: list[MemorySample], columns: dict[str, array[int]], first: int) -> Peaks:
    """Return the peak growth over the helper's samples and this process's readings at the marks and at the end.

    Args:
        start: The reading at the beginning of the block.
        readings: Readings at the marks and at the end.
        columns: The helper's samples.
        first: Number of the first sample in the block.
    """
    within: dict[str, array[int]] = {
        kind: columns[kind][first:] for kind in ("anon", "file", "shmem", "peak") if kind in columns
    }

    def highest(kind: str) -> int:
        seen: list[int] = [getattr(reading, f"{kind}_bytes") for reading in (start, *readings)]
        return max(*seen, max(within.get(kind, ()), default=0)) - seen[0]

    recorded = max(within.pop("peak", ()), default=0)
    sums = map(sum, zip(*within.values(), strict=True))
    own = max(max(reading.total_bytes, reading.peak_bytes) for reading in readings)
    total = max(start.total_bytes, own, recorded, max(sums, default=0))
    return Peaks(
        anon_bytes=highest("anon"),
        file_bytes=highest("file"),
        shmem_bytes=highest("shmem"),
        total_bytes=total - start.total_bytes,
    )


def _cgroup(group: MemoryGroup | None, columns: dict[str, array[int]]) -> CgroupReport | None:
    if group is None:
        return None
    return CgroupReport(
        version=group.version,
        path=group.path,
        limit_bytes=group.limit_bytes,
        start_bytes=group.usage_bytes,
        peak_bytes=max(group.usage_bytes, max(columns.get("cgroup", ()), default=0)),
    )


class _Helper:
    """The sampling process; a thread of this process if none can be started or there is no ``/proc``."""

    def __init__(self, process: subprocess.Popen[bytes] | None, interval_seconds: float) -> None:
        self.separate = process is not None
        self._process = process
        self._interval = interval_seconds
        self._stopped = False
        self._samples: list[tuple[int, MemorySample]] = []
        self._samplers: list[Worker] = []
        if process is None:  # if no thread can be started either, the readings at start, marks and end still count
            try:
                start_threads(self._samplers, 1, self._watch, "sluice-sampler")
            except BaseException:  # an interrupt: ``stop`` would never be called
                self._stopped = True
                raise

    @classmethod
    def start(cls, interval_seconds: float, *, group: MemoryGroup | None) -> _Helper:
        """Start a helper and wait for its first sample."""
        settings = [str(os.getpid()), str(interval_seconds), group.usage_file if group else ""]
        process = None
        with suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, "-I", _sampler.__file__, *settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                process.communicate()
                process = None
        return cls(process, interval_seconds)

    def stop(self) -> dict[str, array[int]]:
        """Stop sampling and return the columns of all samples; see ``Sampler``."""
        if self._process is None:
            self._stopped = True
            join_threads(self._samplers)
            columns = {"time_ns": array("q", [moment for moment, _ in self._samples])}
            for kind in ("anon", "file", "shmem", "peak"):
                columns[kind] = array("q", [getattr(sample, f"{kind}_bytes") for _, sample in self._samples])
            return columns
        answer, _ = self._process.communicate(b"\n")
        head, _, body = answer.partition(b"\n")
        # Without a head the helper was killed: the readings at start, marks and end still count.
        names = json.loads(head or "[]")
        length = len(body) // max(1, len(names))
        read = {name: array("q", body[n * length : (n + 1) * length]) for n, name in enumerate(names)}
        return read or {"time_ns": array("q")}

    def _watch(self) -> None:
        due = time.monotonic() + self._interval
        while not self._stopped:
            time.sleep(min(self._interval, _NOTICE_SECONDS))
            if time.monotonic() >= due:
                due += self._interval
                self._samples.append((time.monotonic_ns(), read_memory()))


class DeviceMeter:
    """Peak and current memory of each accelerator since the construction of the meter."""

    def __init__(self) -> None:
        self._start: dict[str, tuple[int, int]] = {}
        for device, module, number in _devices():
            module.reset_peak_memory_stats(number)
            self._start[device] = module.memory_allocated(number), module.memory_reserved(number)

    def allocated(self) -> dict[str, int]:
        """Return the currently allocated bytes of each device."""
        return {device: module.memory_allocated(number) for device, module, number in _devices()}

    def growth(self) -> tuple[DeviceReport, ...]:
        """Return the growth of each device; of one that was first used after the start, from 0."""
        return tuple(self._growth(*each) for each in _devices())

    def _growth(self, device: str, module: Any, number: int) -> DeviceReport:
        allocated, reserved = self._start.get(device, (0, 0))
        return DeviceReport(
            device=device,
            allocated_bytes=module.max_memory_allocated(number) - allocated,
            reserved_bytes=module.max_memory_reserved(number) - reserved,
            final_bytes=module.memory_allocated(number) - allocated,
        )


def _devices() -> list[tuple[str, Any, int]]:
    """Return name, torch module and number of each initialized accelerator."""
    torch = sys.modules.get("torch")
    kind = None if torch is None else torch.accelerator.current_accelerator()
    if torch is None or kind is None:
        return []
    module: Any = getattr(torch, kind.type, None)
    if not hasattr(module, "max_memory_reserved") or not (module.is_available() and module.is_initialized()):
        return []
    return [(f"{kind.type}:{number}", module, number) for number in range(module.device_count())]
