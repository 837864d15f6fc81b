"""The machine of a benchmark: processor, memory, file system, accelerator and package versions; a folder on it.

A checkpoint is dropped from its page cache, or read into it, and mincore says whether that succeeded.
"""

from __future__ import annotations

import datetime as dt
import mmap
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import psutil
import torch

from sluice._units import format_bytes
from sluice.machine.facts import machine_facts
from sluice.machine.filesystems import filesystem_type
from sluice.records.geometry import round_up
from sluice.sources.pages import resident_bytes

__all__ = ["cached_share", "describe", "device", "free_memory_bytes", "make_cold", "make_warm", "temporary_folder"]


def device() -> str:
    """Return the device of the finished models: ``"cuda"`` if available, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_memory_bytes() -> int:
    """Return the available host memory in bytes: free memory, or the rest of the control group's limit if smaller."""
    return machine_facts(()).host_headroom[0]


def describe(directory: Path, packages: Iterable[str]) -> dict[str, str]:
    """Return the facts to print with a table.

    Args:
        directory: Directory of the checkpoints.
        packages: Names of the distributions whose versions are listed; missing ones are listed as absent.
    """
    matched = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    processor = matched[1] if matched else platform.machine()
    facts = {
        "date": dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d"),
        "processor": f"{processor}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{format_bytes(psutil.virtual_memory().total)}, {format_bytes(free_memory_bytes())} free",
        "file system": filesystem_type(str(directory)),
        "system": f"{platform.system()} {platform.release()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(_version, packages)]),
    }
    if device() == "cuda":
        facts["accelerator"] = torch.cuda.get_device_name()
    return facts


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} absent"


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Lend a new directory for large checkpoints; remove it afterwards, also after an interrupt or SIGTERM.

    Args:
        parent: Parent directory, which is created; None for the system's temporary directory.
    """
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="sluice-bench-", dir=parent))
    # By default SIGTERM ends Python without cleanup.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        signal.signal(signal.SIGTERM, before)


#: Attempts to drop pages and seconds between them: pages in use by the kernel are not dropped at the first request.
_ATTEMPTS = 20
_PAUSE_SECONDS = 0.05

#: Attempts to read a file into the cache: the kernel may reclaim pages meanwhile.
_READINGS = 3

#: A file counts as cold below this share of cached pages, and as warm above one minus it.
_TOLERANCE = 0.001

_READ_BYTES = 8 << 20


def _files(checkpoint: Path) -> Iterator[Path]:
    yield from sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]


def cached_share(checkpoint: Path) -> float:
    """Return the fraction of the checkpoint's pages in the page cache, from 0 to 1."""
    cached = total = 0
    for file in _files(checkpoint):
        size = file.stat().st_size
        total += round_up(size, mmap.PAGESIZE)
        with file.open("rb") as stream:
            cached += resident_bytes(stream.fileno(), 0, size) if size else 0
    return cached / max(1, total)


def make_cold(checkpoint: Path) -> bool:
    """Sync the checkpoint, drop it from the page cache and return whether that succeeded.

    It fails on file systems without a disk (tmpfs). Caches of the storage device are not affected.
    """
    for _ in range(_ATTEMPTS):
        for file in _files(checkpoint):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                with suppress(OSError):  # file systems that are never written, such as squashfs, refuse it
                    os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        if cached_share(checkpoint) <= _TOLERANCE:
            return True
        time.sleep(_PAUSE_SECONDS)
    return False


def make_warm(checkpoint: Path) -> bool:
    """Read the checkpoint into the page cache if needed; return whether it is cached, which takes enough memory."""
    buffer = bytearray(_READ_BYTES)
    for _ in range(_READINGS):
        if cached_share(checkpoint) >= 1 - _TOLERANCE:
            return True
        for file in _files(checkpoint):
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
    return cached_share(checkpoint) >= 1 - _TOLERANCE
