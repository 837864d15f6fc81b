"""Run one method in a fresh process and measure its memory from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from typing import IO, Any, cast

import torch

from sluice._units import format_bytes
from sluice.benchmark.methods import METHODS
from sluice.benchmark.records import MethodJob, Outcome, Verdict
from sluice.benchmark.watching import Watcher
from sluice.measuring._limit import limited_group

__all__ = ["TIMEOUT_SECONDS", "run_job"]

#: Default time limit of a process.
TIMEOUT_SECONDS = 900.0

#: Program of the child. What the method needs is imported first, before anything else of sluice: the benchmark's own
#: modules would hide a part of the time that importing sluice takes.
_PROGRAM = """
import json, pkgutil, sys, time
import torch
begin = time.perf_counter()
for name in json.loads(sys.argv[2]):
    try:
        pkgutil.resolve_name(name)
    except ImportError:
        break  # the child says which
seconds = time.perf_counter() - begin
from sluice.benchmark.child import main
main(seconds)
"""

#: Type of the clock of a process that counts its processor time: CPUCLOCK_SCHED of the kernel.
_SCHEDULED = 2

#: Longest reason of a failure, in characters.
_REASON_LETTERS = 300


def run_job(
    job: MethodJob, *, timeout_seconds: float = TIMEOUT_SECONDS, host_limit_bytes: int | None = None
) -> Outcome:
    """Run a job in a fresh process and return its outcome; failures of the job are outcomes, not exceptions.

    Args:
        job: The job.
        timeout_seconds: Time limit.
        host_limit_bytes: Limit of the process's host memory, interpreter included, enforced by a control group; None
            for no limit.

    Raises:
        PermissionError: There is a limit, and this process may not create a control group.
    """
    imports = json.dumps(METHODS[job.method].imports)
    command = [sys.executable, "-c", _PROGRAM, json.dumps(dataclasses.asdict(job)), imports]
    if host_limit_bytes is None:
        return _run(command, job, timeout_seconds)
    with limited_group(host_limit_bytes) as group:
        outcome = _run(group.command(command), job, timeout_seconds)
        if outcome.status == "killed" and group.oom_kills:
            limit = format_bytes(host_limit_bytes)
            return dataclasses.replace(outcome, reason=f"out of memory: killed by the kernel at the limit of {limit}")
    return outcome


def _run(command: list[str], job: MethodJob, timeout_seconds: float) -> Outcome:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=environment,
            text=True,
        )
        overdue = threading.Event()
        timer = threading.Timer(timeout_seconds, _stop, [process, overdue])
        timer.start()
        try:
            with process:
                outcome = _converse(process, job)
        finally:
            timer.cancel()
            process.kill()
        if overdue.is_set():
            return dataclasses.replace(outcome, status="timeout", reason=f"stopped after {timeout_seconds:g} s")
        if outcome.status == "killed":
            return dataclasses.replace(outcome, reason=_last_words(process.returncode, complaints))
        return outcome


def _stop(process: subprocess.Popen[str], overdue: threading.Event) -> None:
    overdue.set()
    process.kill()


def _converse(process: subprocess.Popen[str], job: MethodJob) -> Outcome:
    """Run the protocol of a job. The outcome is ``killed`` if the process ended without a message."""
    ready = _listen(process)
    if ready["event"] != "ready":
        return Outcome(status=ready["event"], reason=_clause(ready))
    watcher = Watcher(process.pid, device_used=_device_used if job.device == "cuda" else None)
    _answer(process)
    built = _listen(process)
    before = _cpu_seconds(process.pid)
    _answer(process)
    loaded = _listen(process) if built["event"] == "built" else built
    cpu_seconds = max(0.0, _cpu_seconds(process.pid) - before)
    peaks, trace = watcher.stop(exact_peak=ready["peak_was_reset"])
    outcome = Outcome(
        status="ok" if loaded["event"] == "loaded" else loaded["event"],
        reason=_clause(loaded),
        seconds=loaded.get("seconds", 0.0),
        cpu_seconds=cpu_seconds,
        import_seconds=built.get("import_seconds", 0.0),
        build_seconds=built.get("build_seconds", 0.0),
        anon_bytes=peaks.anon,
        file_bytes=peaks.file,
        shmem_bytes=peaks.shmem,
        total_bytes=peaks.total,
        trace=trace,
        device_allocated_bytes=loaded.get("device_allocated_bytes", 0),
        device_reserved_bytes=loaded.get("device_reserved_bytes", 0),
    )
    if outcome.status != "ok":
        return outcome
    _answer(process)
    return _verified(outcome, _listen(process)) if job.verify else outcome


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, user and system; 0 if it has ended."""
    try:
        # The kernel's name for the clock of process `pid`, as clock_getcpuclockid computes it.
        return time.clock_gettime(~pid << 3 | _SCHEDULED)
    except OSError:
        return 0.0


def _device_used() -> int:
    """Return the accelerator memory used by all processes, in bytes; the first call creates a context in this one."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def _verified(outcome: Outcome, message: dict[str, Any]) -> Outcome:
    if message["event"] == "nothing to verify":
        return outcome
    if message["event"] != "verified":
        return dataclasses.replace(outcome, status=message["event"], reason=_clause(message))
    verdict = message["verdict"]
    return dataclasses.replace(outcome, verdict=Verdict(weights=verdict["weights"], logits=tuple(verdict["logits"])))


def _clause(message: dict[str, Any]) -> str:
    """Return the reason in a message, shortened to one line: exceptions of torch can list every name of a model."""
    return textwrap.shorten(message.get("reason", ""), _REASON_LETTERS, placeholder=" ...")


def _listen(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    return cast("dict[str, Any]", json.loads(line)) if line else {"event": "killed"}


def _answer(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process died; the next read reports it
        os.write(process.stdin.fileno(), b"\n")


def _last_words(returncode: int, complaints: IO[bytes]) -> str:
    """Return why a process ended: its signal, or the last line of its standard error."""
    if returncode == -signal.SIGKILL:
        return "killed by the system: out of memory"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {returncode}"
