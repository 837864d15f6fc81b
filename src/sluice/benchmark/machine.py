"""The machine of a benchmark: processor, memory, file system, accelerator and package versions; a folder on it."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import psutil
import torch

from sluice._units import format_bytes
from sluice.machine.facts import machine_facts
from sluice.machine.filesystems import filesystem_type

__all__ = ["describe", "device", "free_memory_bytes", "temporary_folder"]


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
    facts = {
        "date": dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d"),
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{format_bytes(psutil.virtual_memory().total)}, {format_bytes(free_memory_bytes())} free",
        "file system": filesystem_type(str(directory)),
        "system": f"{platform.system()} {platform.release()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(_version, packages)]),
    }
    if device() == "cuda":
        facts["accelerator"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    matched = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return matched[1] if matched else platform.machine()


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
