"""Processes as the system shows them: their memory by kind, its growth during a block, and whether they run.

Linux splits the memory and reports an exact peak. ``VmHWM`` is the kernel's record of the largest resident size.
Writing 5 to ``clear_refs`` resets it (proc(5)), so the peak of a block is exact and no sample can miss it. Samples only
split it by kind.

Small files below ``/proc`` and ``/sys`` are read with three system calls each.
"""

from __future__ import annotations

import ctypes
import io
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Literal, Self

from msgspec import Struct

from sluice import _defaults as defaults
from sluice._threads import Worker, join_threads, start_threads
from sluice.records import Peaks

__all__ = [
    "BEFORE_RESTART",
    "NO_MEMORY",
    "MemorySample",
    "PeakMeter",
    "ProcessState",
    "RunningProcess",
    "read_memory",
    "read_system_file",
    "restart_peak",
    "state_of",
    "this_process",
    "trim_heap",
]

#: Most bytes of such a file. The kernel writes one page for most of them.
_MOST_BYTES = 1 << 16

#: Fields of ``/proc/PID/status`` that a sample has, in KiB and in the kernel's order.
_FIELDS = ("VmHWM", "RssAnon", "RssFile", "RssShmem")
_STATUS = re.compile("".join(rf"^{name}:\s+(\d+) kB\n(?:.*\n)*?" for name in _FIELDS).encode(), re.MULTILINE)


# Files are opened as objects, not descriptors: an interrupt right after a file was opened closes it, too. An opener in
# Python would be interrupted before it returns the descriptor. These file systems create and truncate nothing.
def read_system_file(path: str) -> bytes | None:
    """Return the first 64 KiB of a file; None if it does not exist or cannot be read."""
    try:
        with io.FileIO(path, opener=os.open) as file:
            return file.read(_MOST_BYTES)
    except OSError:  # also if the file is of a process that has ended
        return None


class MemorySample(Struct, frozen=True, kw_only=True):
    """Resident host memory of one process at one moment, in bytes."""

    #: Private anonymous memory.
    anon_bytes: int
    #: Pages of mapped files.
    file_bytes: int
    #: Shared memory.
    shmem_bytes: int
    #: Largest total since the process started or its record was reset; the current total if unknown.
    peak_bytes: int

    @property
    def total_bytes(self) -> int:
        """The three kinds together: the resident set size."""
        return self.anon_bytes + self.file_bytes + self.shmem_bytes

    def growth(self, start: MemorySample, total_bytes: int | None = None) -> Peaks:
        """Return the growth since an earlier sample; ``total_bytes`` takes the place of the total."""
        return Peaks(
            anon_bytes=self.anon_bytes - start.anon_bytes,
            file_bytes=self.file_bytes - start.file_bytes,
            shmem_bytes=self.shmem_bytes - start.shmem_bytes,
            total_bytes=(self.total_bytes if total_bytes is None else total_bytes) - start.total_bytes,
        )


#: The sample of a process before it has any.
NO_MEMORY = MemorySample(anon_bytes=0, file_bytes=0, shmem_bytes=0, peak_bytes=0)


def read_memory() -> MemorySample:
    """Return the resident memory of this process; where the system does not split it, all of it counts as anonymous."""
    found = _STATUS.search(read_system_file("/proc/self/status") or b"")
    if found is None:  # macOS, Windows
        import psutil

        resident = psutil.Process().memory_info().rss
        return MemorySample(anon_bytes=resident, file_bytes=0, shmem_bytes=0, peak_bytes=resident)
    peak, anon, file, shmem = map(int, found.groups())
    return MemorySample(anon_bytes=anon << 10, file_bytes=file << 10, shmem_bytes=shmem << 10, peak_bytes=peak << 10)


#: Called before the record restarts: each meter in its block takes the peak so far.
BEFORE_RESTART: set[Callable[[], None]] = set()


def restart_peak() -> bool:
    """Restart this process's ``VmHWM`` record at its present size; return whether the system allowed it."""
    for take in tuple(BEFORE_RESTART):
        take()
    try:
        with io.FileIO("/proc/self/clear_refs", "w", opener=os.open) as file:
            return file.write(b"5") == 1
    except OSError:
        return False


def trim_heap() -> None:
    """Return freed memory of all threads to the system, where the C library can: in glibc.

    It keeps what was freed in blocks below a size that grows with the blocks that are freed, up to 32 MiB
    (``M_MMAP_THRESHOLD`` in mallopt(3)).
    """
    if sys.platform == "linux":  # Windows cannot load the process itself as a library
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


class PeakMeter:
    """Measures the growth of the memory of this process during a ``with`` block.

    Example:
        >>> with PeakMeter() as meter:
        ...     data = bytearray(1 << 20)
        >>> meter.peaks.total_bytes >= 0
        True
    """

    def __init__(self) -> None:
        #: Held during the block: a sampler that waits for it wakes as soon as the block ends.
        self._stop = threading.Lock()
        self._samplers: list[Worker] = []
        self._base = self._highest = NO_MEMORY
        self._exact = False

    def __enter__(self) -> Self:
        self._exact = restart_peak()
        self._base = self._highest = read_memory()
        self._stop.acquire()
        BEFORE_RESTART.add(self._take)
        return self

    def sample(self) -> None:
        """Start the thread that samples until the end of the block. Without it, the two ends and VmHWM still count."""
        if not self._samplers:
            start_threads(self._samplers, 1, self._sample, "sluice-sampler")

    def __exit__(self, *error: object) -> None:
        self._stop.release()
        try:
            if self._samplers:
                join_threads(self._samplers)
            self._take()
        finally:
            BEFORE_RESTART.discard(self._take)

    @property
    def peaks(self) -> Peaks:
        """Growth from the start of the block to each peak, in bytes."""
        return self._highest.growth(self._base, max(self._highest.peak_bytes, self._base.total_bytes))

    def _sample(self) -> None:
        while not self._stop.acquire(timeout=defaults.SAMPLE_SECONDS):
            self._take()

    def _take(self) -> None:
        now, high = read_memory(), self._highest
        self._highest = MemorySample(
            anon_bytes=max(now.anon_bytes, high.anon_bytes),
            file_bytes=max(now.file_bytes, high.file_bytes),
            shmem_bytes=max(now.shmem_bytes, high.shmem_bytes),
            peak_bytes=max(now.peak_bytes if self._exact else now.total_bytes, high.peak_bytes),
        )


#: ``unknown``: on another host, in another namespace of process ids, or not on Linux.
ProcessState = Literal["running", "stopped", "gone", "unknown"]


class RunningProcess(Struct, frozen=True, kw_only=True):
    """A process and its host."""

    #: Identity of the host, the same for all processes that share its memory: boot id and name.
    host: str
    #: Name of the host, for messages.
    hostname: str
    #: Namespace of ``pid``; empty if unknown.
    namespace: str
    #: Number of the process.
    pid: int
    #: Start of the process in ticks since the boot, which distinguishes it from a later one with the same number.
    started: int


def this_process() -> RunningProcess:
    """Return the identity of this process. Linux; outside of it, whether another one runs is unknown."""
    import socket  # here, not above: only processes that wait for each other need it

    hostname = socket.gethostname()
    boot = (read_system_file("/proc/sys/kernel/random/boot_id") or b"").decode().strip()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return RunningProcess(
        host=f"{boot} {hostname}",
        hostname=hostname,
        namespace=namespace and f"{boot} {namespace}",
        pid=os.getpid(),
        started=_state_and_start(os.getpid())[1],
    )


def state_of(process: RunningProcess, seen_by: RunningProcess) -> ProcessState:
    """Return the state of a process, if it is visible to the process ``seen_by``, which is this one."""
    if not process.namespace or process.namespace != seen_by.namespace:
        return "unknown"
    state, started = _state_and_start(process.pid)
    if state in {"", "Z", "X"} or started != process.started:
        return "gone"
    return "stopped" if state == "T" else "running"


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return the state letter and the start of a process; an empty letter if there is none."""
    text = (read_system_file(f"/proc/{pid}/stat") or b"").decode(errors="replace")
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return (fields[0], int(fields[19])) if len(fields) > 19 else ("", 0)
