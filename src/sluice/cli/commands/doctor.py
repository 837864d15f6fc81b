"""``sluice doctor``: what a bug report needs; nothing is sent anywhere."""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from sluice import __version__
from sluice._units import format_bytes
from sluice.machine.facts import machine_facts
from sluice.machine.filesystems import filesystem_type
from sluice.sources.local import LocalFile
from sluice.sources.protocol import DirectIOUnavailable

__all__ = ["doctor_command", "facts"]

#: Variables that change what sluice and the libraries below it do.
_VARIABLES = re.compile(
    r"(SLUICE|HF|HUGGINGFACE|TRANSFORMERS|PYTORCH|CUDA|NVIDIA|HIP|ROCR|OMP|MKL|MALLOC|AWS|GOOGLE|AZURE)_\w+"
    r"|LD_PRELOAD|TMPDIR|PYTHON\w+|LANG|LC_ALL|(HTTPS?|NO|ALL)_PROXY",
    re.IGNORECASE,
)

#: Variables whose value is shown; of all others only that they are set.
_SHOWN = re.compile(
    r"(PYTORCH\w*_ALLOC_CONF|CUDA_VISIBLE_DEVICES|(OMP|MKL)_NUM_THREADS|MALLOC_\w+|HF_(HUB_)?OFFLINE"
    r"|TRANSFORMERS_OFFLINE|HF_HOME|HF_HUB_CACHE|TMPDIR|LANG|LC_ALL|LD_PRELOAD|PYTHON(MALLOC|OPTIMIZE|UTF8|DEVMODE))"
)

#: Libraries whose versions matter besides those that sluice names as its own.
_LIBRARIES = ("torch", "numpy", "safetensors", "psutil", "msgspec")


def facts(path: str) -> dict[str, dict[str, Any]]:
    """Return the facts by subject; what cannot be found out is None."""
    return {
        "versions": _versions(),
        "system": {
            "platform": platform.platform(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "page bytes": mmap.PAGESIZE,
            "transparent huge pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
            "free page reporting": _chosen("/sys/module/page_reporting/parameters/page_reporting_order"),
        },
        "memory": _memory(),
        "path": _place(path),
        "accelerators": _accelerators(),
        "environment": {
            name: value if _SHOWN.fullmatch(name) else "set, not shown"
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name)
        },
    }


def _versions() -> dict[str, Any]:
    needed = {re.split(r"[^\w.-]", each)[0] for each in metadata.requires("sluice") or ()}
    found: dict[str, Any] = {"sluice": __version__, "python": sys.version.split()[0]}
    for name in sorted({*needed, *_LIBRARIES}):
        found[name] = None
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _memory() -> dict[str, Any]:
    import psutil

    known = machine_facts(())
    return {
        "total": psutil.virtual_memory().total,
        "available": known.memory_available_bytes,
        "swap": psutil.swap_memory().total,
        "cgroup leaves": known.memory_limit_bytes,
    }


def _place(path: str) -> dict[str, Any]:
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    found: dict[str, Any] = {"path": os.path.abspath(path), "file system": filesystem_type(path) or None}
    with suppress(OSError, AttributeError):
        status = os.statvfs(folder)
        found["free"] = status.f_bavail * status.f_frsize
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".sluice-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            with LocalFile(file.name).lend(direct=True):
                found["direct I/O"] = True
    except DirectIOUnavailable:
        found["direct I/O"] = "no: the system or the file system has none"
    except OSError as error:
        found["direct I/O"] = f"no: {error.strerror or error}"
    return found


def _accelerators() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch was built for": torch.version.cuda or getattr(torch.version, "hip", None) or "cpu"}
    with suppress(Exception):  # a driver that fails is what the report is about, and torch names it elsewhere
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            found[f"cuda:{number}"] = f"{device.name}, {format_bytes(device.total_memory)}"
    return found


def _chosen(file: str) -> str | None:
    """Return what a file of the kernel says; of several words the one in brackets."""
    with suppress(OSError):
        text = Path(file).read_text(encoding="ascii").strip()
        chosen = re.search(r"\[(.+?)\]", text)
        return chosen[1] if chosen else text
    return None


@click.command("doctor")
@click.argument("path", default=".", type=click.Path(exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def doctor_command(path: str, *, as_json: bool) -> None:
    """Show versions, memory, disks, accelerators and settings: what a bug report needs.

    PATH is a file or directory whose file system is examined; a file of 4 KiB is written there for a moment. Values of
    variables that can hold secrets or addresses are not shown.
    """
    found = facts(path)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for subject, values in found.items():
        click.echo(subject)
        for name, value in values.items():
            shown = format_bytes(value) if subject != "system" and isinstance(value, int) and value > 1 else value
            click.echo(f"  {name:<24} {'unknown or absent' if shown is None else shown}")
