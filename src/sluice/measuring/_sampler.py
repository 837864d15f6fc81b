"""The helper process of ``sluice.measure``: samples the memory of its parent process until it is stopped.

It runs as a separate script, so that the interpreter lock of the measured process cannot hide a peak, and imports only
the standard library (and NVML's binding on request), so that it starts in about 20 ms. Protocol, over pipes: it writes
``ready``, samples until its standard input has a byte or ends, and then writes one line of JSON and the columns of all
samples as 64-bit integers.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from array import array
from contextlib import suppress
from typing import Any

#: Beyond this many samples, neighbors are merged and the interval is doubled: hours take at most about 15 MB.
MOST_SAMPLES = 200_000

#: Interval between reads of smaps_rollup, in seconds: each walks all page tables, which takes milliseconds.
PSS_SECONDS = 0.1

#: Value of a reading that was not taken.
ABSENT = -1

_STATUS = re.compile(rb"^(?:RssAnon|RssFile|RssShmem|VmHWM):\s+(\d+) kB$", re.MULTILINE)
_ORDER = re.compile(rb"^(RssAnon|RssFile|RssShmem|VmHWM):", re.MULTILINE)
_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)

#: Columns before those of the devices. Times are those of ``time.monotonic_ns``; the other units are bytes.
COLUMNS = ("time_ns", "anon", "file", "shmem", "peak", "pss", "cgroup")


class Sampler:
    """Takes samples into columns.

    Args:
        pid: The process to sample.
        pss: Whether to read its proportional set size, too.
        cgroup: The file with the usage of its control group; empty for none.
        devices: The devices to sample.
    """

    def __init__(self, pid: int, *, pss: bool, cgroup: str, devices: Devices) -> None:
        self._status = os.open(f"/proc/{pid}/status", os.O_RDONLY)  # read again for each sample
        order = [name.decode() for name in _ORDER.findall(os.pread(self._status, 1 << 16, 0))]
        self._order = [order.index(name) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")]
        self._rollup = f"/proc/{pid}/smaps_rollup" if pss else ""
        self._next_pss = 0
        self._pss = ABSENT
        self._cgroup = cgroup
        self._devices = devices
        self.columns = [array("q") for _ in range(len(COLUMNS) + len(devices.names))]

    def take(self) -> None:
        """Take one sample; raise ``ProcessLookupError`` if the process has ended."""
        now = time.monotonic_ns()
        fields = _STATUS.findall(os.pread(self._status, 1 << 16, 0))
        if len(fields) != len(self._order):
            raise ProcessLookupError("the process has ended")
        values = [int(fields[position]) << 10 for position in self._order]
        for column, value in zip(
            self.columns, (now, *values, self._read_pss(now), self._read_cgroup(), *self._devices.used()), strict=True
        ):
            column.append(value)
        if len(self.columns[0]) >= MOST_SAMPLES:
            self.thin()

    def thin(self) -> None:
        """Merge each pair of neighbors into one sample with the larger of each reading."""
        for column in self.columns:
            column[:] = array("q", map(max, column[0::2], column[1::2]))

    def close(self) -> None:
        """Close the status file of the process."""
        os.close(self._status)

    def _read_pss(self, now: int) -> int:
        if self._rollup and now >= self._next_pss:
            self._next_pss = now + int(PSS_SECONDS * 1e9)
            with open(self._rollup, "rb") as stream:
                self._pss = int(_PSS.findall(stream.read())[0]) << 10
        return self._pss

    def _read_cgroup(self) -> int:
        if not self._cgroup:
            return ABSENT
        with open(self._cgroup, "rb") as stream:
            return int(stream.read())


def watch(sampler: Sampler, interval_seconds: float, stop: int) -> None:
    """Sample at an interval until the descriptor ``stop`` has something to read, or the process ends."""
    joined = 1
    due = time.monotonic()
    try:
        while True:
            before = len(sampler.columns[0])
            sampler.take()
            joined = joined * 2 if len(sampler.columns[0]) < before else joined
            due = max(due + interval_seconds * joined, time.monotonic())
            if select.select([stop], [], [], max(0.0, due - time.monotonic()))[0]:
                sampler.take()
                return
    except (OSError, ValueError):  # the process has ended: keep the samples
        return


class Devices:
    """NVIDIA devices in NVML's order; none if disabled, or if NVML's binding or the driver is missing.

    Args:
        enabled: Whether to sample devices.
    """

    def __init__(self, *, enabled: bool) -> None:
        #: UUID of each device. torch and NVML order devices differently under CUDA_VISIBLE_DEVICES.
        self.names: list[str] = []
        self._handles: list[Any] = []
        if not enabled:
            return
        try:
            import pynvml  # type: ignore[import-not-found, unused-ignore]  # comes with nvidia-ml-py
        except ImportError:  # isolated mode (-I) has a shorter module search path than the parent
            return
        self._nvml = pynvml
        with suppress(pynvml.NVMLError):  # a machine without a driver, or a container without the devices
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
            self.names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
            self._handles = handles

    def used(self) -> list[int]:
        """Return the used bytes of each device; ``ABSENT`` if NVML fails."""
        return [self._used(handle) for handle in self._handles]

    def _used(self, handle: Any) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except self._nvml.NVMLError:
            return ABSENT


def main(settings: dict[str, object]) -> None:
    """Run the helper process; ``settings`` come as JSON in the first argument."""
    devices = Devices(enabled=bool(settings["nvml"]))
    sampler = Sampler(
        int(str(settings["pid"])), pss=bool(settings["pss"]), cgroup=str(settings["cgroup"]), devices=devices
    )
    sampler.take()
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    watch(sampler, float(str(settings["interval_seconds"])), sys.stdin.fileno())
    sampler.close()
    header = {"columns": len(sampler.columns), "samples": len(sampler.columns[0]), "devices": devices.names}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    for column in sampler.columns:
        sys.stdout.buffer.write(column.tobytes())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
