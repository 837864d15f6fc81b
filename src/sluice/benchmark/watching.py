"""Watches the memory of another process while it loads: peaks by kind, and what the chart draws."""

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

#: Between two looks at the memory of a process.
_SAMPLE_SECONDS = 0.002

#: Moments of a trace: as many as a wide screen has columns for a chart.
_MOMENTS = 400

_KINDS = ("anon", "file", "shmem")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPeaks:
    """Largest growth over the first look, in bytes."""

    #: Private anonymous memory.
    anon: int
    #: Mapped file pages.
    file: int
    #: Shared memory.
    shmem: int
    #: The three together.
    total: int


class _Accelerator(Devices):
    """One device, or none, as torch counts it: NVML's binding need not be installed."""

    def __init__(self, look: Callable[[], int] | None) -> None:
        super().__init__(enabled=False)
        self._look = look
        self.names = ["accelerator"] if look else []

    def used(self) -> list[int]:
        return [self._look()] if self._look else []


class Watcher:
    """Looks at a process from a thread of this one until it is stopped.

    Args:
        pid: The process; it has to be alive.
        device_used: Returns the bytes in use of the accelerator; None without one.
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
        """Stop and return what was seen; with ``exact_peak`` the kernel's own high-water mark counts too."""
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
            # The first look was taken before anything moved; the mark's own counter may lag behind it.
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
    """Return a trace of not many more moments than asked for: neighbours are represented by the one that holds most.

    The first and the last moment stay, and so does every peak of host and device.
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
