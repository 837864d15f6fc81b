"""The control groups of this process and their memory limits, in both hierarchies. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from msgspec import Struct
from msgspec.structs import astuple

from sluice.machine.processes import read_system_file

__all__ = ["MemoryGroup", "cgroup_headroom", "memory_groups", "tightest"]

#: cgroup v1 writes "no limit" as the largest page-aligned int64.
_UNLIMITED_BYTES = 1 << 62


class _Place(Struct, frozen=True):
    """The files of one control group that counts this process's memory."""

    #: Version of its hierarchy: 1 or 2.
    version: int
    #: Path below the mount point; ``"/"`` for the root.
    path: str
    #: Files that report its limit, its usage in bytes, and other figures.
    limit_file: str
    usage_file: str
    statistics_file: str
    #: Name of the reclaimable bytes in the statistics.
    reclaimable: bytes


class MemoryGroup(_Place, frozen=True, kw_only=True):
    """One control group, and its figures."""

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
    groups = (_group(place, _limit(place)) for place in _places(root))
    return [group for group in groups if group is not None]


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
    # A group without a limit is not asked for its usage: a load of a small file would wait for that.
    limits = [(place, _limit(place)) for place in _places(root) if _can_be_limited(place.limit_file)]
    groups = [_group(place, limit) for place, limit in limits if limit is not None]
    found = tightest([group for group in groups if group is not None])
    return None if found is None else found.room_bytes


def _places(root: Path) -> tuple[_Place, ...]:
    """Return the places of this process's groups. A process can be moved, so its groups are asked each time."""
    top = os.fspath(root).rstrip("/")
    return _places_of(top, read_system_file(f"{top}/proc/self/cgroup") or b"")


@lru_cache(maxsize=8)
def _places_of(top: str, memberships: bytes) -> tuple[_Place, ...]:
    """Return the places of the groups that ``/proc/self/cgroup`` lists, each followed by its ancestors."""
    places: list[_Place] = []
    for line in memberships.decode(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                names = ("memory.max", "memory.current", "memory.stat")
                places += _ancestors(f"{top}/{mount}", path, 2, names, b"inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
            places += _ancestors(f"{top}/sys/fs/cgroup/memory", path, 1, names, b"total_inactive_file")
    return tuple(places)


def _ancestors(
    mount: str, path: str, version: int, names: tuple[str, str, str], reclaimable: bytes
) -> Iterator[_Place]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # outside the namespace
        parts = []
    for count in range(len(parts), -1, -1):
        below = "/".join(parts[:count])
        directory = f"{mount}/{below}" if below else mount
        limit, usage, statistics = (f"{directory}/{name}" for name in names)
        yield _Place(version, f"/{below}", limit, usage, statistics, reclaimable)


@lru_cache(maxsize=64)
def _can_be_limited(limit_file: str) -> bool:
    """Return whether a group has a limit, or may get one later, when the controller is turned on for it.

    The root of a hierarchy never has one in version 2, and is the only group without ``cgroup.type``. A namespace can
    hide groups, and a hierarchy may not be mounted.
    """
    return os.path.exists(limit_file) or os.path.exists(os.path.join(os.path.dirname(limit_file), "cgroup.type"))


def _group(place: _Place, limit_bytes: int | None) -> MemoryGroup | None:
    usage = _number(place.usage_file)
    if usage is None:
        return None
    values = (line.partition(b" ") for line in (read_system_file(place.statistics_file) or b"").splitlines())
    free = next((int(value) for name, _, value in values if name == place.reclaimable), 0)
    return MemoryGroup(*astuple(place), usage_bytes=usage, limit_bytes=limit_bytes, reclaimable_bytes=free)


def _limit(place: _Place) -> int | None:
    limit = _number(place.limit_file)
    return None if limit is None or limit >= _UNLIMITED_BYTES else limit


def _number(path: str) -> int | None:
    text = (read_system_file(path) or b"").strip()
    return int(text) if text.isdigit() else None  # absent, or "max"
