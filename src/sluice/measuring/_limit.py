"""Runs a program under a hard memory limit: in a control group of its own. Linux; both hierarchies.

A group counts what its processes take from their start on: private memory, the file pages that they read, kernel
memory. The kernel takes clean file pages away before it kills. Swap is shut where the kernel counts it, or the limit
would only make the program slow.

Making a group needs the right to write below ``/sys/fs/cgroup``: root has it, also in many virtual machines and
privileged containers. Under version 2 the group must be made beside that of this process, because a group that holds
processes may not hand its memory controller to children.
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

from sluice.machine.cgroups import MemoryGroup, memory_groups

__all__ = ["LimitedGroup", "LimitedRun", "limited_group", "memory_limit_refusal", "run_limited"]

#: The shell joins the group and becomes the program, so that not one page of it goes uncounted.
_JOIN_THEN_BECOME = 'echo $$ > "$0" && exec "$@"'

#: Attempts to remove a group, and seconds between them: a killed process leaves it a moment after its parent knows.
_REMOVALS = 100
_REMOVAL_SECONDS = 0.02

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedGroup:
    """A control group whose processes together may take no more than its limit."""

    #: 1 or 2: the hierarchy that it belongs to.
    version: int
    #: Its directory.
    path: Path
    #: What its processes may take together, in bytes.
    limit_bytes: int

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs ``arguments`` inside; for ``subprocess.Popen`` and its like.

        Example:
            >>> with limited_group(256 << 20) as group:
            ...     subprocess.run(group.command(["true"]), check=True)
        """
        return ["/bin/sh", "-c", _JOIN_THEN_BECOME, str(self.path / "cgroup.procs"), *arguments]

    @property
    def oom_kills(self) -> int:
        """Processes that the kernel killed in it because the limit left no room."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        lines = (self.path / name).read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    @property
    def peak_bytes(self) -> int | None:
        """The most that it ever took, in bytes, cached file pages included; None where the kernel does not say."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        try:
            return int((self.path / name).read_text(encoding="ascii"))
        except OSError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedRun:
    """What became of a program under a memory limit."""

    #: Its exit status; negative for the signal that ended it.
    returncode: int
    #: Whether the kernel killed it, or a process that it started, because the limit left no room.
    oom_killed: bool
    #: The most that it took, in bytes, cached file pages included; None where the kernel does not say.
    peak_bytes: int | None
    #: What it wrote to its standard output.
    stdout: str
    #: What it wrote to its standard error.
    stderr: str


@contextlib.contextmanager
def limited_group(limit_bytes: int, *, root: Path = Path("/")) -> Iterator[LimitedGroup]:
    """Make a control group for the block. Whatever still runs in it at the end is killed.

    Args:
        limit_bytes: What its processes may take together, in bytes; rounded up to whole pages.
        root: Where ``proc`` and ``sys`` are found.

    Raises:
        PermissionError: The system does not let this process make one; the message says what is needed.
        ValueError: The limit is not positive.

    Example:
        >>> with limited_group(1 << 30) as group:
        ...     process = subprocess.Popen(group.command(["python", "train.py"]))
        ...     process.wait()
        ...     print(group.oom_kills, group.peak_bytes)
    """
    if limit_bytes <= 0:
        raise ValueError(f"a memory limit is positive: {limit_bytes}")
    group = _make(-(-limit_bytes // _PAGE_BYTES) * _PAGE_BYTES, root)
    try:
        yield group
    finally:
        _remove(group.path)


def run_limited(
    arguments: Sequence[str],
    limit_bytes: int,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_seconds: float | None = None,
) -> LimitedRun:
    """Run a program in a control group of its own and return what became of it.

    Args:
        arguments: The program and its arguments.
        limit_bytes: What it may take, in bytes, with all that it starts; from its first page on.
        env: Its environment; None for this process's.
        cwd: Its working directory; None for this process's.
        timeout_seconds: How long it may take; None for ever.

    Raises:
        PermissionError: The system does not let this process make a group; the message says what is needed.
        subprocess.TimeoutExpired: It took too long, and was killed.

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


def memory_limit_refusal() -> str | None:
    """Return why this process cannot make a control group with a memory limit, and what is needed; None if it can.

    A group is made and removed to find out.

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
            "a memory limit needs a control group with the memory controller (Linux, /sys/fs/cgroup mounted): "
            "none is visible to this process"
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
        "a memory limit needs the right to make a control group: run as root (in a container: --privileged), or start "
        "the whole command under `systemd-run --user --scope -p MemoryMax=SIZE` or `docker run -m SIZE`; "
        f"refused below {', '.join(refused) or 'every group of this process'}"
    )


def _parents(groups: Sequence[MemoryGroup]) -> Iterator[Path]:
    """Yield the directories in which a group may be made, the nearest first."""
    for group in groups:
        directory = Path(group.usage_file).parent
        if group.version == 1 or "memory" in _words(directory / "cgroup.subtree_control"):
            yield directory
    # The top of version 2 has no usage of its own, so it is not among the groups.
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
    with contextlib.suppress(FileNotFoundError, PermissionError):  # the kernel does not count swap
        _set(path / swap_name, swap_bytes)


def _set(path: Path, value: int) -> None:
    # Never create: where the kernel has no such file, a plain write would make one on a fake or wrong mount.
    with path.open("r+", encoding="ascii") as stream:
        stream.write(f"{value}\n")


def _remove(path: Path) -> None:
    """Kill what is left in a group and remove it; best effort, because the block's own outcome matters more."""
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
