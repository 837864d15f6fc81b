"""Errors of the operating system: the advice fits the error number."""

from __future__ import annotations

import errno
import os

import pytest

from sluice._errors import ReadError, ReadPermissionError, SaveError
from sluice._messages import read_error, save_error


@pytest.mark.parametrize(
    ("number", "reading", "saving"),
    [
        (errno.ENOSPC, ReadError.advice, "Free space"),
        (errno.EDQUOT, ReadError.advice, "quota"),
        (errno.EFBIG, ReadError.advice, "max_shard_size"),
        (errno.EACCES, "permissions of the file", "permissions of the directory"),
        (errno.EPERM, "permissions of the file", "permissions of the directory"),
        (errno.EROFS, ReadError.advice, "read-only"),
        (errno.EIO, "dmesg", "dmesg"),
        (errno.EMFILE, "ulimit -n", "ulimit -n"),
        (errno.ENFILE, "on this machine", "on this machine"),
        (errno.ENOMEM, "out of memory", "out of memory"),
        (errno.ENAMETOOLONG, "too long", "too long"),
        (errno.ELOOP, "circle", "circle"),
        (errno.ENOTDIR, "not a directory", "not a directory"),
        (errno.EISDIR, "path of a file", "choose another one"),
        (errno.ESTALE, "file server", "file server"),
        (errno.ETIMEDOUT, "network mount", "network mount"),
        (errno.EINVAL, ReadError.advice, SaveError.advice),
    ],
)
def test_the_advice_fits_the_number(number: int, reading: str, saving: str) -> None:
    cause = OSError(number, os.strerror(number))
    read = read_error("reading failed", cause, file="x", offset=3)
    saved = save_error("refused", cause, file="y")
    assert reading in read.advice
    assert saving in saved.advice
    assert str(read).startswith(f"x, byte 3: reading failed: {os.strerror(number)}. ")
    assert str(saved).startswith(f"y: refused: {os.strerror(number)}. ")
    assert ("space" in saved.advice) == (number in {errno.ENOSPC, errno.EDQUOT})
    assert (read.errno, read.strerror, read.filename) == (number, os.strerror(number), "x")


def test_a_refused_access_is_a_permission_error() -> None:
    error = read_error("it cannot be opened", PermissionError(errno.EACCES, "Permission denied"), file="x")
    assert type(error) is ReadPermissionError
    assert isinstance(error, (ReadError, PermissionError))


def test_an_error_without_a_number() -> None:
    error = read_error("reading failed", OSError("odd"), file="x")
    assert (error.errno, error.advice) == (None, ReadError.advice)
    assert str(error) == f"x: reading failed: odd. {ReadError.advice}"
