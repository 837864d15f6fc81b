"""Identity of this process, and whether another process of the host still runs. Linux; unknown elsewhere."""

from __future__ import annotations

import os
import socket
from typing import Literal

from msgspec import Struct

from sluice.machine.system_files import read_system_file

__all__ = ["ProcessState", "RunningProcess", "state_of", "this_process"]

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
    """Return the identity of this process."""
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
