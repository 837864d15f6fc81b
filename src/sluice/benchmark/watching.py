"""Sample the memory of a separate process during a load: peaks by kind, and a trace for the chart."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from sluice.benchmark.records import Trace
from sluice.measuring import _sampler
from sluice.measuring._sampler import Devices, Sampler

__all__ = ["ObservedPeaks", "Watcher", "thin"]

#: Interval between two samples, in seconds.
_SAMPLE_SECONDS = 0.002

#: Number of moments of a trace: the columns of a chart on a wide screen.
_MOMENTS = 400

_KINDS = ("anon", "file", "shmem")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPeaks:
    """Peak growth since the first sample, in bytes."""

    #: Private anonymous memory.
    anon: int
    #: Mapped file pages.
    file: int
    #: Shared memory.
    shmem: int
    #: Their sum.
    total: int


class _Accelerator(Devices):
    """One device or none, measured with torch: NVML's binding is not needed."""

    def __init__(self, read_used: Callable[[], int] | None) -> None:
        super().__init__(enabled=False)
        self._read_used = read_used
        self.names = ["accelerator"] if read_used else []

    def used(self) -> list[int]:
        return [self._read_used()] if self._read_used else []


class Watcher:
    """Samples a process from a thread of this process until stopped.

    Args:
        pid: The process; it must be alive.
        device_used: Returns the used bytes of the accelerator; None without one.
    """

    def __init__(self, pid: int, *, device_used: Callable[[], int] | None = None) -> None:
        self._sampler = Sampler(pid, pss=False, cgroup="", devices=_Accelerator(device_used))
        self._sampler.take()
        self._stopping, self._stop = os.pipe()
        self._thread = threading.Thread(
            target=_sampler.watch, args=(self._sampler, _SAMPLE_SECONDS, self._stopping), name="watcher", daemon=True
        )
        self._thread.start()

    def stop(self, *, exact_peak: bool) -> tuple[ObservedPeaks, Trace]:
        """Stop and return peaks and trace; with ``exact_peak`` the kernel's high-water mark is included."""
        os.write(self._stop, b"\n")
        self._thread.join()
        os.close(self._stop)
        os.close(self._stopping)
        self._sampler.close()
        named = dict(zip(_sampler.COLUMNS, self._sampler.columns, strict=False))
        grown = {kind: [value - named[kind][0] for value in named[kind]] for kind in _KINDS}
        totals = list(map(sum, zip(*grown.values(), strict=True)))
        if exact_peak:
            before = sum(named[kind][0] for kind in _KINDS)
            # Relative to the first sample, which precedes the load; the mark's own counter may lag.
            totals.append(max(named["peak"]) - before)
        peaks = ObservedPeaks(**{kind: max(values) for kind, values in grown.items()}, total=max(totals))
        return peaks, thin(self._trace(named["time_ns"], grown))

    def _trace(self, times: array[int], grown: dict[str, list[int]]) -> Trace:
        device = self._sampler.columns[len(_sampler.COLUMNS) :]
        return Trace(
            seconds=tuple((moment - times[0]) / 1e9 for moment in times),
            **{kind: tuple(values) for kind, values in grown.items()},
            device=tuple(value - device[0][0] for value in device[0]) if device else (),
        )


def thin(trace: Trace, *, moments: int = _MOMENTS) -> Trace:
    """Thin a trace to about ``moments`` moments: groups of neighbors are represented by their maxima.

    The first and last moments and the peaks of host and device are kept.
    """
    count = len(trace.seconds)
    step = -(-count // moments)
    if step <= 1:
        return trace
    totals = trace.total()
    columns = [totals, *([trace.device] if trace.device else [])]
    kept = {0, count - 1}
    for start in range(0, count, step):
        group = range(start, min(start + step, count))
        kept.update(max(group, key=column.__getitem__) for column in columns)
    chosen = sorted(kept)
    return Trace(
        seconds=tuple(trace.seconds[position] for position in chosen),
        anon=tuple(trace.anon[position] for position in chosen),
        file=tuple(trace.file[position] for position in chosen),
        shmem=tuple(trace.shmem[position] for position in chosen),
        device=tuple(trace.device[position] for position in chosen) if trace.device else (),
    )
