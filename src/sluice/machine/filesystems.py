"""Types of file systems, as mounts name them: ``"ext4"``, ``"nfs4"``, ``"tmpfs"``.

The table of mounts is searched once per device and number of its file system (``statfs``). Both are asked each time:
the same device can be mounted again with another file system.
"""

from __future__ import annotations

import ctypes
import os
import sys

import psutil

__all__ = ["LOCAL_FILESYSTEMS", "filesystem_type"]

#: File systems on disks or in memory of the host itself; ``"memory"`` for sources in memory.
LOCAL_FILESYSTEMS = frozenset(
    {
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "erofs", "overlay", "zfs", "bcachefs", "squashfs"),
        *("apfs", "hfs", "ntfs", "ntfs3", "exfat", "vfat", "tmpfs", "ramfs", "memory"),
    }
)

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None

#: Bytes of a ``struct statfs``, rounded up. Its first field is the number of the type, a long.
_STATFS_BYTES = 256

#: Type by device and number.
_known: dict[tuple[int, int], str] = {}


def filesystem_type(path: str) -> str:
    """Return the type of the file system that holds ``path``; empty if unknown."""
    number = _type_number(path)
    if number is None:
        return _mounted_type(path)
    try:
        key = os.stat(path).st_dev, number
    except OSError:
        return _mounted_type(path)
    if key not in _known:
        _known[key] = _mounted_type(path)
    return _known[key]


def _type_number(path: str) -> int | None:
    """Return the kernel's number for the type of a file system; None if there is no file or the platform has none."""
    if _libc is None:
        return None
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(path), found):
        return None
    return ctypes.c_long.from_buffer(found).value


def _mounted_type(path: str) -> str:
    """Return the type of the longest mount point above a path."""
    real = os.path.realpath(path)
    best, kind = "", ""
    for partition in psutil.disk_partitions(all=True):
        mount = partition.mountpoint
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, partition.fstype
    return kind
