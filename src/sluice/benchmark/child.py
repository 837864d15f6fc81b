"""The measured process of every benchmark; ``process`` starts it.

Protocol: one JSON object per line. ``ready`` when the work is prepared, ``built`` when the clock may start, ``ok`` when
the timed part is done, ``checked`` with what the work returned; or ``failed`` or ``absent`` with a reason. After the
first three it waits for a line, so that its parent can measure it while it is idle.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from sluice.benchmark.machine import free_memory_bytes
from sluice.machine.processes import restart_peak

__all__ = ["main", "touch_free_memory"]

_PART_BYTES = 64 << 20


def main(import_seconds: float) -> None:
    """Run the task of ``sys.argv[1]`` and report the result.

    Args:
        import_seconds: Time of the task's imports, measured before anything of sluice was imported.
    """
    # Output of libraries must not mix with the lines of the protocol.
    protocol = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:  # not in every container
        stream.write("1000")  # the kernel kills this process first, so that the comparison continues

    def say(event: str, **fields: object) -> None:
        protocol.write(json.dumps({"event": event, **fields}) + "\n")

    try:
        _serve(json.loads(sys.argv[1]), say, sys.stdin, import_seconds)
    except Exception as error:  # noqa: BLE001 - a peer may raise anything, and the parent shows it in a row
        say("failed", reason=f"{type(error).__name__}: {error}")


def _serve(task: dict[str, Any], say: Callable[..., None], answers: IO[str], import_seconds: float) -> None:
    try:
        steps = pkgutil.resolve_name(task["work"])(**task["arguments"])
        next(steps)
    except ImportError as error:
        say("absent", reason=str(error))
        return
    time.sleep(max(0.0, task["claim_time"] - time.monotonic()))
    touch_free_memory(task["claimed_bytes"])  # last, because the effect is short
    say("ready", peak_was_reset=restart_peak())
    answers.readline()
    begin = time.perf_counter()
    next(steps)
    say("built", build_seconds=time.perf_counter() - begin, import_seconds=import_seconds)
    answers.readline()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    next(steps)
    say("ok", seconds=time.perf_counter() - begin, cpu_seconds=time.process_time() - cpu_begin)
    answers.readline()
    facts: dict[str, Any] = {}
    try:
        next(steps)
    except StopIteration as end:
        facts = end.value or {}
    say("checked", facts=facts)


def touch_free_memory(nbytes: int) -> None:
    """Touch this much memory and free it.

    A virtual machine returns freed memory to its host, and the next touch of such a page takes ten times as long.
    Without this, a method would pay for memory that the method before it did not use. The effect lasts two seconds:
    then the kernel returns the memory again. Two threads take a quarter of one's time on some hosts.
    """
    available = free_memory_bytes() * 3 // 4  # leaves room under a memory limit
    if not (size := min(nbytes, available)):
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for at in range(0, size, _PART_BYTES):
                pool.submit(ctypes.memset, address + at, 1, min(_PART_BYTES, size - at))
