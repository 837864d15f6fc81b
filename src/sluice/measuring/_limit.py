"""Run a program under a hard memory limit, in a control group of its own. Linux, cgroup v1 and v2.

A group counts the memory of its processes from their start: private memory, file pages that they read, and kernel
memory. The kernel reclaims clean file pages before it kills a process. Swap is disabled if the kernel accounts for it;
otherwise the limit would only slow the program down.

Creating a group needs write access below ``/sys/fs/cgroup``: root has it, also in many virtual machines and privileged
containers. Under version 2 the group must be a sibling of the group of this process, because a group with processes
cannot delegate its memory controller to children.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice._public import public
from sluice.machine.cgroups import MemoryGroup, memory_groups

__all__ = ["LimitedGroup", "LimitedRun", "limited_group", "memory_limit_refusal", "run_limited"]

#: The shell joins the group and then executes the program, so that every page of the program is counted.
_JOIN_THEN_BECOME = 'echo $$ > "$0" && exec "$@"'

#: Attempts to remove a group and seconds between them: a killed process leaves its group after its parent was notified.
_REMOVALS = 100
_REMOVAL_SECONDS = 0.02

_PAGE_BYTES = 4096


@public("sluice.measuring")
@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedGroup:
    """A control group with a memory limit for all of its processes together."""

    #: cgroup version, 1 or 2.
    version: int
    #: Its directory.
    path: Path
    #: Memory limit of all its processes together, in bytes.
    limit_bytes: int

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs ``arguments`` in the group, for ``subprocess``.

        Example:
            >>> with limited_group(256 << 20) as group:
            ...     subprocess.run(group.command(["true"]), check=True)
        """
        return ["/bin/sh", "-c", _JOIN_THEN_BECOME, str(self.path / "cgroup.procs"), *arguments]

    @property
    def oom_kills(self) -> int:
        """Number of its processes that the kernel killed at the limit."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        lines = (self.path / name).read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory in bytes, cached file pages included; None if the kernel does not report it."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        try:
            return int((self.path / name).read_text(encoding="ascii"))
        except OSError:
            return None


@public("sluice.measuring")
@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedRun:
    """Result of a program under a memory limit."""

    #: Exit status; the negative signal number if a signal ended it.
    returncode: int
    #: Whether the kernel killed it, or a process that it started, at the limit.
    oom_killed: bool
    #: Peak memory in bytes, cached file pages included; None if the kernel does not report it.
    peak_bytes: int | None
    #: Its standard output.
    stdout: str
    #: Its standard error.
    stderr: str


@public("sluice.measuring")
@contextlib.contextmanager
def limited_group(limit_bytes: int, *, root: Path = Path("/")) -> Iterator[LimitedGroup]:
    """Create a control group for the block. Processes that still run in it at the end are killed.

    Args:
        limit_bytes: Memory limit of all its processes together, in bytes; rounded up to whole pages.
        root: Directory of ``proc`` and ``sys``.

    Raises:
        PermissionError: This process may not create a control group; the message names what is needed.
        ValueError: The limit is not positive.

    Example:
        >>> with limited_group(1 << 30) as group:
        ...     process = subprocess.Popen(group.command(["python", "train.py"]))
        ...     process.wait()
        ...     print(group.oom_kills, group.peak_bytes)
    """
    if limit_bytes <= 0:
        raise ValueError(f"limit_bytes must be positive, not {limit_bytes}")
    group = _make(-(-limit_bytes // _PAGE_BYTES) * _PAGE_BYTES, root)
    try:
        yield group
    finally:
        _remove(group.path)


@public("sluice.measuring")
def run_limited(
    arguments: Sequence[str],
    limit_bytes: int,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_seconds: float | None = None,
) -> LimitedRun:
    """Run a program in a control group of its own and return its result.

    Args:
        arguments: The program and its arguments.
        limit_bytes: Memory limit of the program and all processes that it starts, in bytes.
        env: Its environment; None for that of this process.
        cwd: Its working directory; None for that of this process.
        timeout_seconds: Longest run time; None for no limit.

    Raises:
        PermissionError: This process may not create a control group; the message names what is needed.
        subprocess.TimeoutExpired: It ran for too long and was killed.

    Example:
        >>> run_limited(["python", "-c", "b'x' * (1 << 30)"], 256 << 20).oom_killed
        True
    """
    with limited_group(limit_bytes) as group:
        done = subprocess.run(
            group.command(arguments),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=env,
            cwd=cwd,
            timeout=timeout_seconds,
        )
        return LimitedRun(
            returncode=done.returncode,
            oom_killed=group.oom_kills > 0,
            peak_bytes=group.peak_bytes,
            stdout=done.stdout,
            stderr=done.stderr,
        )


@public("sluice.measuring")
def memory_limit_refusal() -> str | None:
    """Return why this process cannot create a control group with a memory limit, and what is needed; None if it can.

    A group is created and removed to find out.

    Example:
        >>> if reason := memory_limit_refusal():
        ...     pytest.skip(reason)
    """
    try:
        with limited_group(1 << 30):
            return None
    except PermissionError as error:
        return str(error)


def _make(limit_bytes: int, root: Path) -> LimitedGroup:
    groups = memory_groups(root)
    if not groups:
        raise PermissionError(
            "a memory limit needs a control group with the memory controller (Linux, /sys/fs/cgroup mounted), "
            "and this process sees none"
        )
    refused = []
    for parent in _parents(groups):
        path = parent / f"sluice-{os.getpid()}-{secrets.token_hex(4)}"
        version = 1 if (parent / "memory.limit_in_bytes").exists() else 2
        try:
            path.mkdir()
        except OSError as error:
            refused.append(f"{parent} ({error.strerror})")
            continue
        try:
            _limit(path, version, limit_bytes)
        except OSError as error:
            _remove(path)
            refused.append(f"{parent} ({error.strerror})")
            continue
        return LimitedGroup(version=version, path=path, limit_bytes=limit_bytes)
    raise PermissionError(
        "a memory limit needs permission to create a control group: run as root (in a container: --privileged), or "
        "start the whole command under `systemd-run --user --scope -p MemoryMax=SIZE` or `docker run -m SIZE`; "
        f"refused below {', '.join(refused) or 'every group of this process'}"
    )


def _parents(groups: Sequence[MemoryGroup]) -> Iterator[Path]:
    """Yield the directories in which a group can be created, nearest first."""
    for group in groups:
        directory = Path(group.usage_file).parent
        if group.version == 1 or "memory" in _words(directory / "cgroup.subtree_control"):
            yield directory
    # The root of version 2 has no usage of its own, so it is not among the groups.
    depths = [(Path(group.usage_file), group.path.rstrip("/").count("/")) for group in groups if group.version == 2]
    top = depths[0][0].parents[depths[0][1]] if depths else None
    if top is not None and "memory" in _words(top / "cgroup.subtree_control"):
        yield top


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


def _limit(path: Path, version: int, limit_bytes: int) -> None:
    name, swap_name, swap_bytes = {
        1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", limit_bytes),
        2: ("memory.max", "memory.swap.max", 0),
    }[version]
    _set(path / name, limit_bytes)
    with contextlib.suppress(FileNotFoundError, PermissionError):  # the kernel does not account for swap
        _set(path / swap_name, swap_bytes)


def _set(path: Path, value: int) -> None:
    # Never create the file: if the kernel does not have it, the mount is not a cgroup file system.
    with path.open("r+", encoding="ascii") as stream:
        stream.write(f"{value}\n")


def _remove(path: Path) -> None:
    """Kill the remaining processes of a group and remove it; best effort, so as not to hide the block's outcome."""
    for _ in range(_REMOVALS):
        for pid in _words(path / "cgroup.procs"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(_REMOVAL_SECONDS)
        else:
            return
