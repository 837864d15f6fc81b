"""Memory of processes over time, on host and device, and a picture of it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Sample", "Trace", "Watcher", "draw"]

_GIB = 1 << 30

#: Interval of samples: a sample takes tens of microseconds, and the shortest load tenths of a second.
_INTERVAL_SECONDS = 0.01

#: Growth of the device's memory that indicates its first use by a process: a context takes hundreds of MiB.
_CONTEXT_BYTES = 64 << 20

_COLUMNS = 4

#: Height of a panel relative to its highest line, with space for the figures.
_HEADROOM = 1.25

#: Blue and orange are distinguishable with color vision deficiency.
_DEVICE_COLOUR, _HOST_COLOUR, _FINAL_COLOUR = "#2a6fb0", "#d95f02", "#888888"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample."""

    #: Time since the start of the watcher, in seconds.
    seconds: float
    #: Resident memory of all children of this process, in bytes.
    host_bytes: int
    #: Device memory used by all processes, in bytes.
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Samples of one process."""

    #: Title of its panel.
    title: str
    #: F: bytes of the finished tensors.
    final_bytes: int
    #: Samples in order; the first precedes the start of the process.
    samples: tuple[Sample, ...]

    @property
    def device_growth_bytes(self) -> int:
        """Peak growth of the device's memory since the first sample, the process's context included, in bytes."""
        used = [sample.device_bytes for sample in self.samples]
        return max(used) - used[0] if used else 0

    def lines(self) -> tuple[list[float], list[float], list[float]]:
        """Return seconds, growth on the device and memory on the host in GiB, from the first use of the device on."""
        if not self.samples:
            return [], [], []
        base = self.samples[0].device_bytes
        at_work = [sample for sample in self.samples if sample.device_bytes - base > _CONTEXT_BYTES]
        begin = at_work[0].seconds if at_work else 0.0
        shown = [sample for sample in self.samples if sample.seconds >= begin]
        return (
            [sample.seconds - begin for sample in shown],
            [(sample.device_bytes - base) / _GIB for sample in shown],
            [sample.host_bytes / _GIB for sample in shown],
        )


class Watcher:
    """Samples the device and the children of this process until stopped.

    Args:
        device_used: Returns the used bytes of the device.
        interval_seconds: Time between two samples.
    """

    def __init__(self, device_used: Callable[[], int], *, interval_seconds: float = _INTERVAL_SECONDS) -> None:
        self._device_used = device_used
        self._interval_seconds = interval_seconds
        self._stopped = threading.Event()
        self._begin = time.perf_counter()
        self._samples: list[Sample] = []
        self._look()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            self._look()

    def _look(self) -> None:
        host = 0
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended after the list was read
                host += child.memory_info().rss
        seconds = time.perf_counter() - self._begin
        self._samples.append(Sample(seconds=seconds, host_bytes=host, device_bytes=self._device_used()))

    def stop(self, title: str, final_bytes: int) -> Trace:
        """Stop and return the samples."""
        self._stopped.set()
        self._thread.join()
        return Trace(title=title, final_bytes=final_bytes, samples=tuple(self._samples))


def draw(path: Path, traces: Sequence[Trace]) -> str:
    """Draw each trace into a panel of one picture.

    Args:
        path: The picture to write; its suffix selects the format.
        traces: The traces, a panel each.

    Returns:
        Reason if no picture was drawn, else empty.
    """
    try:
        plots = import_module("matplotlib.figure")
    except ImportError as error:
        return f"no picture: {error}"
    if not traces:
        return "no picture: nothing was watched"
    rows = math.ceil(len(traces) / _COLUMNS)
    figure = plots.Figure(figsize=(3.3 * _COLUMNS, 2.5 * rows + 0.4), layout="constrained")
    panels = list(figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    highest = max(
        value for trace in traces for line in trace.lines()[1:] for value in (*line, trace.final_bytes / _GIB)
    )
    for panel, trace in zip(panels, traces, strict=False):
        _draw_panel(panel, trace)
        panel.set_ylim(0, highest * _HEADROOM)
    for panel in panels[len(traces) :]:
        panel.axis("off")
    figure.suptitle("Memory of the loading process in GiB; the GPU's includes the CUDA context", fontsize=10)
    figure.savefig(path, dpi=130)
    return ""


def _draw_panel(panel: Any, trace: Trace) -> None:
    seconds, device, host = trace.lines()
    final = trace.final_bytes / _GIB
    panel.axhline(final, color=_FINAL_COLOUR, linewidth=0.8, linestyle="--")
    panel.plot(seconds, device, color=_DEVICE_COLOUR, linewidth=1.6)
    panel.plot(seconds, host, color=_HOST_COLOUR, linewidth=1.6)
    labels = ((f"GPU {max(device, default=0):.1f}", _DEVICE_COLOUR), (f"host {max(host, default=0):.1f}", _HOST_COLOUR))
    for line, (text, colour) in enumerate((*labels, (f"F {final:.1f}", _FINAL_COLOUR))):
        panel.text(0.03, 0.95 - 0.1 * line, text, color=colour, fontsize=8, va="top", transform=panel.transAxes)
    panel.set_title(trace.title, fontsize=9, loc="left")
    panel.set_xlabel("seconds", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
