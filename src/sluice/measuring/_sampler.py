"""The helper process of ``sluice.measure``: samples the memory of its parent process until it is stopped.

It runs as a separate script, so that the interpreter lock of the measured process cannot hide a peak, and imports only
the standard library, so that it starts in about 20 ms. Protocol, over pipes: it writes ``ready``, samples until its
standard input has a byte or ends, and then writes one line of JSON, the names of the columns, and the columns of all
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
from collections.abc import Callable
from itertools import zip_longest

#: Beyond this many samples, neighbors are merged and the interval is doubled: hours take at most about 15 MB.
MOST_SAMPLES = 200_000

#: Kinds of memory by their name in ``/proc/PID/status``; ``peak`` is recorded by the kernel.
_FIELDS = {"RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem", "VmHWM": "peak"}
_STATUS = re.compile(rf"^({'|'.join(_FIELDS)}):\s+(\d+) kB$".encode(), re.MULTILINE)


class Sampler:
    """Takes samples into columns.

    Args:
        pid: The process to sample.
        cgroup: The file with the usage of its control group; empty for none.
        device_used: Returns the used bytes of an accelerator; None without one.

    Attributes:
        columns: ``time_ns``, of ``time.monotonic_ns``; ``anon``, ``file``, ``shmem`` and ``peak``, in bytes; and what
            was requested of ``cgroup`` and ``device``.
    """

    def __init__(self, pid: int, *, cgroup: str, device_used: Callable[[], int] | None = None) -> None:
        self._status = os.open(f"/proc/{pid}/status", os.O_RDONLY)  # read again for each sample
        order = [_FIELDS[name.decode()] for name, _ in _STATUS.findall(os.pread(self._status, 1 << 16, 0))]
        self._cgroup = cgroup
        self._device_used = device_used
        more = [*(["cgroup"] if cgroup else []), *(["device"] if device_used else [])]
        self.columns = {name: array("q") for name in ("time_ns", *order, *more)}

    def take(self) -> None:
        """Take one sample; raise ``ProcessLookupError`` if the process has ended."""
        values = [time.monotonic_ns()]
        values += [int(value) << 10 for _, value in _STATUS.findall(os.pread(self._status, 1 << 16, 0))]
        if len(values) != 1 + len(_FIELDS):
            raise ProcessLookupError("the process has ended")
        if self._cgroup:
            with open(self._cgroup, "rb") as stream:
                values.append(int(stream.read()))
        if self._device_used:
            values.append(self._device_used())
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)
        if len(self.columns["time_ns"]) >= MOST_SAMPLES:
            self.thin()

    def thin(self) -> None:
        """Merge each pair of neighbors into one sample with the larger of each reading."""
        for column in self.columns.values():
            column[:] = array("q", [max(pair) for pair in zip_longest(column[0::2], column[1::2], fillvalue=0)])

    def close(self) -> None:
        """Close the status file of the process."""
        os.close(self._status)


def watch(sampler: Sampler, interval_seconds: float, stop: int) -> None:
    """Sample at an interval until the descriptor ``stop`` has something to read, or the process ends."""
    joined = 1
    due = time.monotonic()
    times = sampler.columns["time_ns"]
    try:
        while True:
            before = len(times)
            sampler.take()
            joined = joined * 2 if len(times) < before else joined
            due = max(due + interval_seconds * joined, time.monotonic())
            if select.select([stop], [], [], max(0.0, due - time.monotonic()))[0]:
                sampler.take()
                return
    except (OSError, ValueError):  # the process has ended: keep the samples
        return


def main(pid: int, interval_seconds: float, cgroup: str) -> None:
    """Run the helper process."""
    sampler = Sampler(pid, cgroup=cgroup)
    sampler.take()
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    watch(sampler, interval_seconds, sys.stdin.fileno())
    sampler.close()
    sys.stdout.buffer.write(json.dumps(list(sampler.columns)).encode() + b"\n")
    for column in sampler.columns.values():
        sys.stdout.buffer.write(column.tobytes())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
