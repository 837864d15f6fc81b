"""A FUSE file system like a network disk: the files of a directory, with a latency and a limit on the bandwidth.

It speaks the protocol of ``/dev/fuse`` itself, so that the benchmark needs no library: look-up, attributes, open and
read of regular files in one directory, read-only. Each request waits for the latency in a thread of its own; all
requests share the bandwidth.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["slow_files"]

_THREADS = 32

#: Larger than every request: requests of this server carry names, never data.
_REQUEST_BYTES = 1 << 20

_IN_HEADER, _OUT_HEADER = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
_INIT_IN, _INIT_OUT = struct.Struct("<IIII"), struct.Struct("<IIIIHHIIHHI28x")
_ATTRIBUTES = struct.Struct("<6Q3I7I")
_ENTRY, _VALID = struct.Struct("<QQQQII"), struct.Struct("<QII")
_OPENED = struct.Struct("<QII")
_READ = struct.Struct("<QQIIQII")
_STATFS = struct.Struct("<5Q4I24x")

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ_CODE, _STATFS_CODE = 1, 2, 3, 14, 15, 17
_INIT, _OPENDIR, _BATCH_FORGET, _INTERRUPT, _RELEASE, _RELEASEDIR = 26, 27, 42, 36, 18, 29

#: Several requests of one descriptor at once, and requests of more than 32 pages.
_ASYNC_READ, _MAX_PAGES = 1 << 0, 1 << 22
_PAGES = 256

_ROOT = 1
_VALID_SECONDS = 3600

_MS_READ_ONLY, _MS_NO_SUID, _MS_NO_DEVICES = 1, 2, 4


class _Server:
    def __init__(self, device: int, folder: str, latency_seconds: float, bytes_per_second: float) -> None:
        self._device = device
        self._latency = latency_seconds
        self._speed = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._paths = [folder, *(entry.path for entry in os.scandir(folder) if entry.is_file())]
        self._descriptors = [os.open(path, os.O_RDONLY) for path in self._paths]

    def serve(self) -> None:
        threads = [threading.Thread(target=self._answer_all) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _answer_all(self) -> None:
        while True:
            try:
                request = os.read(self._device, _REQUEST_BYTES)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.ENOENT:  # the request was interrupted before it was read
                    continue
                return  # unmounted
            _, code, unique, node, *_ = _IN_HEADER.unpack_from(request)
            if code in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            try:
                answer, error_number = self._answer(code, node, request[_IN_HEADER.size :]), 0
            except OSError as error:
                answer, error_number = b"", error.errno or errno.EIO
            with suppress(OSError):  # the caller was interrupted meanwhile
                header = _OUT_HEADER.pack(_OUT_HEADER.size + len(answer), -error_number, unique)
                os.writev(self._device, [header, answer])

    def _answer(self, code: int, node: int, body: bytes) -> bytes:
        if code == _INIT:
            _, _, ahead, flags = _INIT_IN.unpack_from(body)
            return _INIT_OUT.pack(7, 31, ahead, flags & (_ASYNC_READ | _MAX_PAGES), 64, 48, 4096, 1, _PAGES, 0, 0)
        if code == _LOOKUP:
            found = next((n for n, path in enumerate(self._paths) if n and os.path.basename(path) == _text(body)), None)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "no such file")
            return _ENTRY.pack(found + 1, 0, _VALID_SECONDS, _VALID_SECONDS, 0, 0) + self._attributes(found + 1)
        if code == _GETATTR:
            return _VALID.pack(_VALID_SECONDS, 0, 0) + self._attributes(node)
        if code in (_OPEN, _OPENDIR):
            return _OPENED.pack(0, 0, 0)
        if code == _READ_CODE:
            _, offset, nbytes, *_ = _READ.unpack_from(body)
            return self._read(node, offset, nbytes)
        if code == _STATFS_CODE:
            return _STATFS.pack(0, 0, 0, 0, 0, 4096, 255, 4096, 0)
        if code in (_RELEASE, _RELEASEDIR):
            return b""
        raise OSError(errno.ENOSYS, "not implemented")

    def _read(self, node: int, offset: int, nbytes: int) -> bytes:
        data = os.pread(self._descriptors[node - 1], nbytes, offset)
        with self._lock:
            self._free_at = max(time.monotonic(), self._free_at) + len(data) / self._speed
            until = self._free_at + self._latency
        time.sleep(max(0.0, until - time.monotonic()))
        return data

    def _attributes(self, node: int) -> bytes:
        status = os.fstat(self._descriptors[node - 1])
        times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
        mode = stat.S_IFDIR | 0o555 if node == _ROOT else stat.S_IFREG | 0o444
        seconds, rest = [ns // 10**9 for ns in times], [ns % 10**9 for ns in times]
        return _ATTRIBUTES.pack(node, status.st_size, status.st_blocks, *seconds, *rest, mode, 1, 0, 0, 0, 4096, 0)


def _text(name: bytes) -> str:
    return os.fsdecode(name.rstrip(b"\0"))


@contextmanager
def slow_files(folder: Path, mount: Path, *, latency_seconds: float, bytes_per_second: float) -> Iterator[None]:
    """Mount the files of ``folder`` at ``mount``, slowed down.

    Raises:
        OSError: There is no ``/dev/fuse``, or the system refuses the mount.
    """
    device = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
        flags = _MS_READ_ONLY | _MS_NO_SUID | _MS_NO_DEVICES
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"slow", os.fsencode(mount), b"fuse", ctypes.c_ulong(flags), options.encode()):
            raise OSError(ctypes.get_errno(), f"mounting failed: {os.strerror(ctypes.get_errno())}")
        command = [__file__, str(device), str(folder), str(latency_seconds), str(bytes_per_second)]
        # A session of its own: Ctrl-C must not end it before the file system is unmounted.
        server = subprocess.Popen([sys.executable, *command], pass_fds=[device], start_new_session=True)
    finally:
        os.close(device)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=False, start_new_session=True)
        server.terminate()
        server.wait()


if __name__ == "__main__":
    _Server(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])).serve()
