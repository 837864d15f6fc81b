"""Sample the memory of a separate process during a load: peaks by kind, and a trace for the chart."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from sluice.benchmark.records import Trace
from sluice.measuring import _sampler
from sluice.measuring._sampler import Devices, Sampler

__all__ = ["Watcher", "thin"]

#: Number of moments of a trace: the columns of a chart on a wide screen.
_MOMENTS = 400

_KINDS = ("anon", "file", "shmem")


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
        seconds: Interval between two samples.
        device_used: Returns the used bytes of the accelerator; None without one.
    """

    def __init__(self, pid: int, *, seconds: float = 0.002, device_used: Callable[[], int] | None = None) -> None:
        self._sampler = Sampler(pid, pss=False, cgroup="", devices=_Accelerator(device_used))
        self._sampler.take()
        self._stopping, self._stop = os.pipe()
        self._thread = threading.Thread(
            target=_sampler.watch, args=(self._sampler, seconds, self._stopping), name="watcher", daemon=True
        )
        self._thread.start()

    def stop(self, *, exact_peak: bool) -> tuple[dict[str, int], Trace]:
        """Stop and return peaks by their names in ``Outcome``, and the trace.

        Args:
            exact_peak: Whether the kernel's high-water mark, which was reset, is included.
        """
        os.write(self._stop, b"\n")
        self._thread.join()
        os.close(self._stop)
        os.close(self._stopping)
        self._sampler.close()
        named = dict(zip(_sampler.COLUMNS, self._sampler.columns, strict=False))
        grown = {kind: tuple(value - named[kind][0] for value in named[kind]) for kind in _KINDS}
        device = self._sampler.columns[len(_sampler.COLUMNS) :]
        trace = Trace(
            seconds=tuple((moment - named["time_ns"][0]) / 1e9 for moment in named["time_ns"]),
            **grown,
            device=tuple(value - device[0][0] for value in device[0]) if device else (),
        )
        total = max(trace.total())
        if exact_peak:
            # Relative to the first sample, which precedes the load; the mark's own counter may lag.
            total = max(total, max(named["peak"]) - sum(named[kind][0] for kind in _KINDS))
        return {**{f"{kind}_bytes": max(grown[kind]) for kind in _KINDS}, "total_bytes": total}, thin(trace)


def thin(trace: Trace, *, moments: int = _MOMENTS) -> Trace:
    """Thin a trace to about ``moments`` moments: groups of neighbors are represented by their maxima.

    The first and last moments and the peaks of host and device are kept.
    """
    count = len(trace.seconds)
    step = -(-count // moments)
    if step <= 1:
        return trace
    columns = [trace.total(), *([trace.device] if trace.device else [])]
    kept = {0, count - 1}
    for start in range(0, count, step):
        group = range(start, min(start + step, count))
        kept.update(max(group, key=column.__getitem__) for column in columns)
    names = ("seconds", "anon", "file", "shmem", *(("device",) if trace.device else ()))
    return Trace(**{name: tuple(getattr(trace, name)[position] for position in sorted(kept)) for name in names})
