"""Types of file systems, as mounts name them: ``"ext4"``, ``"nfs4"``, ``"tmpfs"``.

The table of mounts is searched once per device and number of its file system (``statfs``). Both are asked each time:
the same device can be mounted again with another file system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys

__all__ = ["fallocate", "filesystem_type"]

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

#: Bytes of a ``struct statfs``, rounded up. Its first field is the number of the type, a long.
_STATFS_BYTES = 256

#: A space, tab, newline or backslash in the table of mounts.
_ESCAPED = re.compile(rb"\\([0-3][0-7]{2})")

#: Type by device and number.
_known: dict[tuple[int, int], str] = {}


def fallocate(descriptor: int, nbytes: int) -> None:
    """Allocate the space of a file, on file systems that do so without writing.

    Elsewhere, as on NFS before 4.2, ``os.posix_fallocate`` would write to every block, without an end by Ctrl-C.
    """
    while _libc is not None and _libc.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(nbytes)):
        error = ctypes.get_errno()
        if error in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            return
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error))


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
    for mount, found in _mounts():
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def _mounts(table: str = "/proc/self/mounts") -> list[tuple[str, str]]:
    """Return the mount point and the type of each mounted file system.

    Args:
        table: The kernel's table of them. If the system has none, psutil is asked.
    """
    try:
        with open(table, "rb") as file:
            fields = [line.split(b" ") for line in file]
    except OSError:
        import psutil  # here, not above: it takes 7 to 16 ms, and Linux does not need it

        return [(each.mountpoint, each.fstype) for each in psutil.disk_partitions(all=True)]
    return [
        (os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), mount)), kind.decode())
        for _, mount, kind, *_ in fields
    ]
