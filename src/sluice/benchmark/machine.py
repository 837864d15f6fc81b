"""What the figures of a benchmark depend on: the machine, its free memory and the versions."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import psutil
import torch

from sluice._units import format_bytes
from sluice.machine.facts import machine_facts

__all__ = ["describe", "device", "free_memory_bytes", "settling_seconds"]

#: Linux gives freed memory back to the host two seconds after it was freed (``PAGE_REPORTING_DELAY`` in
#: mm/page_reporting.c), and takes a part of a second for it.
_SETTLING_SECONDS = 3.0

#: A virtual machine with a balloon has an entry for it here; only through one is memory given back.
_BALLOONS = Path("/sys/bus/virtio/drivers/virtio_balloon")


def device() -> str:
    """Return where the finished models go: ``"cuda"`` when there is one, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_memory_bytes() -> int:
    """Return the host memory that can be had: what is free, or what the control group leaves when that is less."""
    return machine_facts(()).host_headroom[0]


def settling_seconds() -> float:
    """Return how long to wait after memory was freed until the kernel leaves it alone; 0 where it gives none back."""
    return _SETTLING_SECONDS if any(_BALLOONS.glob("virtio*")) else 0.0


def describe(directory: Path, packages: Iterable[str]) -> dict[str, str]:
    """Return what to print beside a table.

    Args:
        directory: Where the checkpoints are.
        packages: Names of distributions whose versions matter; those not installed are said to be absent.
    """
    facts = {
        "date": dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d"),
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{format_bytes(psutil.virtual_memory().total)}, {format_bytes(free_memory_bytes())} free",
        "file system": _filesystem(directory),
        "system": f"{platform.system()} {platform.release()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(_version, packages)]),
    }
    if device() == "cuda":
        facts["accelerator"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else platform.machine()


def _filesystem(directory: Path) -> str:
    mounts = [part for part in psutil.disk_partitions(all=True) if directory.resolve().is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} absent"
