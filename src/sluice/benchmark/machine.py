"""The machine of a benchmark: processor, memory, file system, accelerator and package versions."""

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

__all__ = ["describe", "device", "free_memory_bytes"]


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
        "file system": _filesystem(directory),
        "system": f"{platform.system()} {platform.release()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(_version, packages)]),
    }
    if device() == "cuda":
        facts["accelerator"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    matched = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return matched[1] if matched else platform.machine()


def _filesystem(directory: Path) -> str:
    mounts = [part for part in psutil.disk_partitions(all=True) if directory.resolve().is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} absent"
