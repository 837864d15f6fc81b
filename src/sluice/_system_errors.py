"""Errors of the operating system as errors of sluice: the class and the advice that fit the error number."""

from __future__ import annotations

import errno

from sluice._errors import ReadError, ReadPermissionError, SaveError

__all__ = ["read_error", "save_error"]

_DESCRIPTORS = "Close files, or raise the limit on open files (ulimit -n), then try again."
_MANY_FILES = "Too many files are open on this machine: close some, then try again."
_LINKS = "The symbolic links of the path form a circle: check them with ls -l."
_NAME = "The path, or a name in it, is too long for the file system: check what was passed."
_PARENT = "A part of the path is a file, not a directory: check the path."
_MEMORY = "The system is out of memory: free some, then try again."
_GONE = "The file or its directory was replaced on the file server: check the network mount, then try again."
_MOUNT = "The network mount does not answer: check it, then try again."
_DEVICE = "The disk failed: check the log of the system (dmesg), and the disk, before you try again."

_ANY_USE = {
    errno.EMFILE: _DESCRIPTORS,
    errno.ENFILE: _MANY_FILES,
    errno.ELOOP: _LINKS,
    errno.ENAMETOOLONG: _NAME,
    errno.ENOTDIR: _PARENT,
    errno.ENOMEM: _MEMORY,
    errno.ESTALE: _GONE,
    errno.ENOTCONN: _MOUNT,
    errno.ETIMEDOUT: _MOUNT,
    errno.EHOSTDOWN: _MOUNT,
    errno.EHOSTUNREACH: _MOUNT,
    errno.EIO: _DEVICE,
    errno.ENXIO: _DEVICE,
    errno.ENODEV: _DEVICE,
}

_READING = _ANY_USE | {errno.EISDIR: "Pass the path of a file."}

_PERMISSIONS = "Check the permissions of the directory, or choose another path."
_SPACE = "Free space or choose another path, then save again."

_SAVING = _ANY_USE | {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: f"The quota is used up. {_SPACE}",
    errno.EFBIG: "The file system or a limit (ulimit -f) does not allow a file of this size: choose another path, or "
    "save shards with max_shard_size.",
    errno.EROFS: "The file system is read-only: choose another path.",
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EBUSY: "Another process or a mount uses the path: choose another one.",
    errno.ENOENT: "The directory does not exist or was removed: check the path, then save again.",
    errno.EISDIR: "The path is a directory: choose another one.",
}


def read_error(problem: str, error: OSError, *, file: str, offset: int | None = None) -> ReadError:
    """Return the error for a failed read; raise it from ``error``.

    Args:
        problem: What failed: ``"the file cannot be opened"``. The text of the system is added.
        error: The error of the system.
        file: Path of the file.
        offset: Byte offset of the read.
    """
    kind = ReadPermissionError if isinstance(error, PermissionError) else ReadError
    advice = None if kind is ReadPermissionError else _READING.get(error.errno or 0)
    read = kind(f"{problem}: {error.strerror or error}", file=file, offset=offset, advice=advice)
    read.errno, read.strerror = error.errno, error.strerror
    return read


def save_error(problem: str, error: OSError, *, file: str) -> SaveError:
    """Return the error for a failed save; raise it from ``error``.

    Args:
        problem: What failed. The text of the system is added.
        error: The error of the system.
        file: Path that is being saved.
    """
    return SaveError(f"{problem}: {error.strerror or error}", file=file, advice=_SAVING.get(error.errno or 0))
