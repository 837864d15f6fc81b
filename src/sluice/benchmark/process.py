"""Run tasks in fresh processes and measure their time and memory from outside."""

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
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sluice._units import format_bytes
from sluice.benchmark.records import BenchTask, Outcome, Trace
from sluice.measuring import _sampler
from sluice.measuring._limit import limited_group
from sluice.measuring._sampler import Sampler

__all__ = ["TIMEOUT_SECONDS", "Watcher", "run_tasks"]

#: Default time limit of a process.
TIMEOUT_SECONDS = 900.0

#: Program of the child. What the task needs is imported first, before anything else of sluice: the benchmark's own
#: modules would hide a part of the time that importing sluice takes.
_PROGRAM = """
import json, pkgutil, sys, time
import torch
begin = time.perf_counter()
for name in json.loads(sys.argv[1])["imports"]:
    try:
        pkgutil.resolve_name(name)
    except ImportError:
        break  # the child says which
seconds = time.perf_counter() - begin
from sluice.benchmark.child import main
main(seconds)
"""

#: Longest reason of a failure, in characters.
_REASON_LETTERS = 300

#: Events of a child that does not fail, in order.
_EVENTS = ("ready", "built", "ok", "checked")

#: Most moments of a trace: the columns of a chart on a wide screen.
_MOMENTS = 800

_KINDS = ("anon", "file", "shmem")


def run_tasks(
    tasks: Sequence[BenchTask], *, timeout_seconds: float = TIMEOUT_SECONDS, host_limit_bytes: int | None = None
) -> list[Outcome]:
    """Run tasks at once, each in a fresh process, and return their outcomes; failures are outcomes, not exceptions.

    Each step begins when all processes have done the step before. If one fails, the others are killed.

    Args:
        tasks: The tasks.
        timeout_seconds: Time limit.
        host_limit_bytes: Limit of the host memory of all processes together, interpreters included, enforced by a
            control group; None for no limit.

    Raises:
        PermissionError: There is a limit, and this process may not create a control group.
    """
    commands = [[sys.executable, "-c", _PROGRAM, json.dumps(dataclasses.asdict(task))] for task in tasks]
    if host_limit_bytes is None:
        return _run(tasks, commands, timeout_seconds)
    with limited_group(host_limit_bytes) as group:
        outcomes = _run(tasks, [group.command(command) for command in commands], timeout_seconds)
        peak, killed_by_group = group.peak_bytes or 0, group.oom_kills > 0
    reason = f"out of memory: killed by the kernel at the limit of {format_bytes(host_limit_bytes)}"
    reasons = [reason if each.status == "killed" and killed_by_group else each.reason for each in outcomes]
    return [
        dataclasses.replace(each, group_bytes=peak, reason=why) for each, why in zip(outcomes, reasons, strict=True)
    ]


def _run(tasks: Sequence[BenchTask], commands: Sequence[Sequence[str]], timeout_seconds: float) -> list[Outcome]:
    overdue = threading.Event()
    with contextlib.ExitStack() as stack:
        children = [_Child(task, command, stack) for task, command in zip(tasks, commands, strict=True)]

        def stop() -> None:
            overdue.set()
            for child in children:
                child.process.kill()

        timer = threading.Timer(timeout_seconds, stop)
        stack.callback(timer.cancel)
        timer.start()
        for event in _EVENTS:
            for child in children:
                child.listen()
            if not all(child.message["event"] == event for child in children):
                break
            for child in children:
                child.go_on(event)
        for child in children:  # those that wait for others
            child.process.kill()
    outcomes = [child.outcome() for child in children]
    if overdue.is_set():
        reason = f"stopped after {timeout_seconds:.3g} s"
        outcomes = [dataclasses.replace(each, status="timeout", reason=reason) for each in outcomes]
    return outcomes


class Watcher:
    """Samples the memory of a process from a thread of this process until stopped.

    Args:
        pid: The process; it must be alive.
        seconds: Interval between two samples.
        device_used: Returns the used bytes of the accelerator; None without one.
    """

    def __init__(self, pid: int, *, seconds: float = 0.002, device_used: Callable[[], int] | None = None) -> None:
        self._sampler = Sampler(pid, cgroup="", device_used=device_used)
        self._sampler.take()
        self._stopping, self._stop = os.pipe()
        self._thread = threading.Thread(
            target=_sampler.watch, args=(self._sampler, seconds, self._stopping), name="watcher", daemon=True
        )
        self._thread.start()

    def stop(self, *, exact_peak: bool) -> tuple[dict[str, int], Trace]:
        """Stop and return peaks by their names in ``Outcome``, and the trace.

        Args:
            exact_peak: Whether the kernel's high-water mark, which was reset, is included.
        """
        os.write(self._stop, b"\n")
        self._thread.join()
        os.close(self._stop)
        os.close(self._stopping)
        self._sampler.close()
        columns = self._sampler.columns
        start = {name: column[0] for name, column in columns.items()}
        peaks = {f"{kind}_bytes": max(columns[kind]) - start[kind] for kind in _KINDS}
        at_start = sum(start[kind] for kind in _KINDS)
        total = max(map(sum, zip(*(columns[kind] for kind in _KINDS), strict=True)))
        if exact_peak:  # the mark's own counter may lag
            total = max(total, *columns["peak"])
        while len(columns["time_ns"]) > _MOMENTS:
            self._sampler.thin()
        grown = {name: tuple(value - start[name] for value in column) for name, column in columns.items()}
        seconds = tuple(moment / 1e9 for moment in grown["time_ns"])
        trace = Trace(seconds=seconds, **{kind: grown[kind] for kind in _KINDS}, device=grown.get("device", ()))
        return {**peaks, "total_bytes": total - at_start}, trace


class _Child:
    """One process, the last message from it, and what was measured of it."""

    def __init__(self, task: BenchTask, command: Sequence[str], stack: contextlib.ExitStack) -> None:
        self._task = task
        self._errors = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        )
        stack.enter_context(self.process)
        self.message: dict[str, Any] = {}
        self._watcher: Watcher | None = None
        self._found: dict[str, Any] = {}
        self._last_words = ""
        stack.callback(self._end)

    def listen(self) -> None:
        """Wait for the next message."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.message = json.loads(line) if line else {"event": "killed"}
        self._found |= {key: value for key, value in self.message.items() if key not in {"event", "reason"}}
        if self.message["event"] != "built":
            self._stop_watching()

    def go_on(self, event: str) -> None:
        """Measure the idle process, and let it do the next step."""
        if event == "ready":
            read_device = _device_used if self._task.watches_device else None
            self._watcher = Watcher(self.process.pid, seconds=self._task.sample_seconds, device_used=read_device)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process died; the next read reports it
            os.write(self.process.stdin.fileno(), b"\n")

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            peaks, trace = self._watcher.stop(exact_peak=self._found.pop("peak_was_reset"))
            self._found |= {"trace": trace, **peaks}
            self._watcher = None

    def _end(self) -> None:
        """Stop watching, and read why the process ended. Called before it is waited for."""
        self.process.kill()
        self.process.wait()
        self._stop_watching()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        returncode = self.process.returncode
        if returncode == -signal.SIGKILL:
            self._last_words = "killed by the system: out of memory"
        elif returncode < 0:
            self._last_words = f"killed by {signal.Signals(-returncode).name}"
        else:
            self._last_words = lines[-1] if lines else f"ended with exit code {returncode}"

    def outcome(self) -> Outcome:
        """Return the outcome: ``killed`` if the process ended without a message."""
        event = self.message["event"]
        self._found.pop("peak_was_reset", None)
        if event == "checked":
            return Outcome(status="ok", **self._found)
        if event in {"killed", "failed", "absent"}:
            reason = self._last_words if event == "killed" else self.message["reason"]
            # Exceptions of torch can list every name of a model.
            reason = textwrap.shorten(reason, _REASON_LETTERS, placeholder=" ...")
            return Outcome(status=event, reason=reason, **self._found)
        return Outcome(status="killed", reason="another process of the same task failed", **self._found)


def _device_used() -> int:
    """Return the accelerator memory used by all processes, in bytes; the first call creates a context in this one."""
    free, total = torch.cuda.mem_get_info()
    return total - free
