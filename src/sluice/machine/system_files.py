"""Small files of the system below ``/proc`` and ``/sys``, read with three system calls each, and processes in them."""

from __future__ import annotations

import io
import os
from typing import Literal

from msgspec import Struct

__all__ = ["ProcessState", "RunningProcess", "read_system_file", "state_of", "this_process", "write_system_file"]

#: Most bytes of such a file. The kernel writes one page for most of them.
_MOST_BYTES = 1 << 16


# Both use a file object, not a descriptor: an interrupt right after the file was opened closes it, too. An opener in
# Python would be interrupted before it returns the descriptor. These file systems create and truncate nothing.


def read_system_file(path: str) -> bytes | None:
    """Return the first 64 KiB of a file; None if it does not exist or cannot be read."""
    try:
        with io.FileIO(path, opener=os.open) as file:
            return file.read(_MOST_BYTES)
    except OSError:  # also if the file is of a process that has ended
        return None


def write_system_file(path: str, data: bytes) -> bool:
    """Write to a file; return whether it exists and the system took the data."""
    try:
        with io.FileIO(path, "w", opener=os.open) as file:
            return file.write(data) == len(data)
    except OSError:
        return False


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
