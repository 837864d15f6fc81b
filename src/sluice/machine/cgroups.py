"""The control groups of this process and their memory limits, in both hierarchies. Linux only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

__all__ = ["MemoryGroup", "cgroup_headroom", "memory_groups", "tightest"]

#: cgroup v1 writes "no limit" as the largest page-aligned int64.
_UNLIMITED_BYTES = 1 << 62


class MemoryGroup(Struct, frozen=True, kw_only=True):
    """One control group that counts this process's memory."""

    #: Version of its hierarchy: 1 or 2.
    version: int
    #: Path below the mount point; ``"/"`` for the root.
    path: str
    #: File that reports its usage in bytes.
    usage_file: str
    #: Current usage in bytes.
    usage_bytes: int
    #: Limit in bytes; None if there is none.
    limit_bytes: int | None
    #: File pages that the kernel reclaims before it kills, in bytes.
    reclaimable_bytes: int

    @property
    def room_bytes(self) -> int | None:
        """Bytes by which its usage may grow; None if there is no limit."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.usage_bytes + self.reclaimable_bytes)


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Return the control groups that count this process's memory, each followed by its ancestors.

    Groups that a namespace hides are skipped.

    Args:
        root: Directory of ``proc`` and ``sys``.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    groups: list[MemoryGroup] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                groups += _groups(root / mount, path, 2, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            groups += _groups(root / "sys/fs/cgroup/memory", path, 1, *names)
    return groups


def tightest(groups: list[MemoryGroup]) -> MemoryGroup | None:
    """Return the group with the least room; without limits the first, which is the process's own; None for none."""
    limited = [(group.room_bytes, number) for number, group in enumerate(groups) if group.room_bytes is not None]
    return groups[min(limited)[1] if limited else 0] if groups else None


def cgroup_headroom(root: Path = Path("/")) -> int | None:
    """Return the bytes left under the tightest memory limit of the control groups of this process, or None.

    Every ancestor counts, and file pages that the kernel would reclaim count as free.

    Args:
        root: Directory of ``proc`` and ``sys``.
    """
    group = tightest(memory_groups(root))
    return group.room_bytes if group else None


def _groups(
    mount: Path, path: str, version: int, limit_name: str, usage_name: str, reclaimable_name: str
) -> Iterator[MemoryGroup]:
    group = mount / path.strip("/")
    while True:
        usage = _number(group / usage_name)
        if usage is not None:
            limit = _number(group / limit_name)
            yield MemoryGroup(
                version=version,
                path="/" if group == mount else f"/{group.relative_to(mount)}",
                usage_file=str(group / usage_name),
                usage_bytes=usage,
                limit_bytes=None if limit is None or limit >= _UNLIMITED_BYTES else limit,
                reclaimable_bytes=_reclaimable(group / "memory.stat", reclaimable_name),
            )
        if group == mount or mount not in group.parents:
            return
        group = group.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or "max"
        return None


def _reclaimable(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
