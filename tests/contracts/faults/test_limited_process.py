"""Loads in processes with tight limits: no new threads, little address space, few descriptors."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import fresh_process

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and their effects are Linux's"),
    pytest.mark.usefixtures("fresh_processes"),
]

MIB = 1 << 20

#: Loads into a module under limits that are set after imports; prints the threads, the reads and the growth.
LOAD = """
import json, os, resource, sys, threading
import torch, sluice
from sluice.testing import assert_peak

path, count, width, options, limits = json.loads(sys.argv[1])
expected = sluice.load_state_dict(path, memory=sluice.MemoryLimits(staging="1MiB"))
if "dtype" in options:
    options["dtype"] = getattr(torch, options["dtype"])
with torch.device("meta"):
    model = torch.nn.ParameterDict({f"w{i}": torch.nn.Parameter(torch.empty(width)) for i in range(count)})

started = []
start = threading.Thread.start
def noted(thread):
    start(thread)
    started.append(thread.name)
threading.Thread.start = noted

if "address_space" in limits:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + limits["address_space"],) * 2)
if "threads" in limits:
    if os.geteuid() == 0:  # root may start as many as it likes
        os.setresuid(65534, 65534, 65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["threads"],) * 2)
with assert_peak(limits["growth"]) as meter:
    report = sluice.load_into(model, path, page_cache="bypass", **options)
torch.set_num_threads(1)  # comparing is not what is limited
for name, tensor in expected.items():
    assert torch.equal(model[name].detach(), tensor.to(model[name].dtype)), name
print(json.dumps([started, report.reads, meter.peaks.total_bytes]))
"""

COUNT, WIDTH = 6, 4 * MIB

#: Bytes of the weights in the file.
FILE_BYTES = COUNT * WIDTH * 4


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    # Not below pytest's own directory, which other users cannot enter: one process changes its user.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        path = Path(directory) / "f.pth"
        torch.save({f"w{i}": torch.full((WIDTH,), float(i)) for i in range(COUNT)}, path)
        yield path


def load(file: Path, limits: dict[str, Any], **options: Any) -> tuple[list[str], dict[str, int], int]:
    """Load in a fresh process under limits; return its threads, its reads and its growth."""
    final = FILE_BYTES // 2 if "dtype" in options else FILE_BYTES
    limits.setdefault("growth", final + (64 + 32) * MIB)
    arguments = json.dumps([str(file), COUNT, WIDTH, options, limits])
    done = fresh_process.run(LOAD, arguments, timeout=100)
    assert done.returncode == 0, done.stderr
    threads, reads, grown = json.loads(done.stdout)
    return threads, reads, grown


CAST = {"dtype": "bfloat16"}


@pytest.mark.parametrize("options", [CAST, pytest.param({}, marks=pytest.mark.long)], ids=["cast", "same dtype"])
def test_a_process_that_may_start_no_thread(file: Path, options: dict[str, str]) -> None:
    threads, _, _ = load(file, {"threads": 1}, **options)
    assert threads == []


@pytest.mark.parametrize("options", [CAST, pytest.param({}, marks=pytest.mark.long)], ids=["cast", "same dtype"])
def test_a_limit_on_address_space(file: Path, options: dict[str, str]) -> None:
    """The limit allows the weights and the gate, and no thread, which would take 72 MiB.

    A direct read takes whole blocks, so a mapping takes a huge page more. Python's heap takes a few arenas.
    """
    room = (FILE_BYTES // 2 if options else FILE_BYTES) + COUNT * 2 * MIB + 64 * MIB + 8 * MIB
    threads, _, _ = load(file, {"address_space": room}, **options)
    assert threads == []
