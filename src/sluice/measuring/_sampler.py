"""The helper process of ``sluice.measure``: looks at the memory of another process until it is told to stop.

It runs as a script of its own, so that no interpreter lock of the measured process can hide a peak from it, and imports
nothing but the standard library (and NVML's binding where asked), so that it starts in some 20 ms. It speaks over
pipes: it writes ``ready``, samples until its standard input has a byte or ends, and then writes one line of JSON and
the columns of all samples as 64-bit integers.
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

#: Beyond this many samples, neighbours are joined and the interval is doubled: hours take no more than some 15 MB.
MOST_SAMPLES = 200_000

#: smaps_rollup walks all page tables, which takes milliseconds: it is read this rarely, in seconds.
PSS_SECONDS = 0.1

#: Reading of a column that was not taken.
ABSENT = -1

_STATUS = re.compile(rb"^(?:RssAnon|RssFile|RssShmem|VmHWM):\s+(\d+) kB$", re.MULTILINE)
_ORDER = re.compile(rb"^(RssAnon|RssFile|RssShmem|VmHWM):", re.MULTILINE)
_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)

#: The columns before those of devices. Times are those of ``time.monotonic_ns``, all else is bytes.
COLUMNS = ("time_ns", "anon", "file", "shmem", "peak", "pss", "cgroup")


class Sampler:
    """Takes samples into columns.

    Args:
        pid: The process to look at.
        pss: Whether to read its proportional set size too.
        cgroup: The file with its control group's usage; empty for none.
        devices: The devices to look at.
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
        """Take one sample; raises ``ProcessLookupError`` when the process has ended."""
        now = time.monotonic_ns()
        found = _STATUS.findall(os.pread(self._status, 1 << 16, 0))
        if len(found) != len(self._order):
            raise ProcessLookupError("the process has ended")
        values = [int(found[position]) << 10 for position in self._order]
        for column, value in zip(
            self.columns, (now, *values, self._read_pss(now), self._read_cgroup(), *self._devices.used()), strict=True
        ):
            column.append(value)
        if len(self.columns[0]) >= MOST_SAMPLES:
            self.thin()

    def thin(self) -> None:
        """Join each two neighbours into one that has the larger of each reading."""
        for column in self.columns:
            column[:] = array("q", map(max, column[0::2], column[1::2]))

    def close(self) -> None:
        """Let go of the process."""
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
    except (OSError, ValueError):  # it has ended: what was seen is the answer
        return


class Devices:
    """NVIDIA devices as NVML counts them; none where it is not wanted, not installed or finds no driver.

    Args:
        wanted: Whether to look at all.
    """

    def __init__(self, *, wanted: bool) -> None:
        #: UUID of each device. Torch counts devices in another order than NVML where CUDA_VISIBLE_DEVICES says so.
        self.names: list[str] = []
        self._handles: list[Any] = []
        if not wanted:
            return
        try:
            import pynvml  # type: ignore[import-not-found, unused-ignore]  # comes with nvidia-ml-py
        except ImportError:  # this process looks for modules in fewer places than the one that asked
            return
        self._nvml = pynvml
        with suppress(pynvml.NVMLError):  # a machine without a driver, or a container without the devices
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
            self.names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
            self._handles = handles

    def used(self) -> list[int]:
        """Return the bytes in use of each device; ``ABSENT`` for one that does not answer."""
        return [self._used(handle) for handle in self._handles]

    def _used(self, handle: Any) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except self._nvml.NVMLError:
            return ABSENT


def main(settings: dict[str, object]) -> None:
    """Run the helper process; ``settings`` come as JSON in the first argument."""
    devices = Devices(wanted=bool(settings["nvml"]))
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
