"""Runs one method in a fresh process and watches its memory from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any, cast

from sluice.benchmark._records import Job, Outcome, Verdict

__all__ = ["run_job"]

#: Between two looks at the memory of a process.
_SAMPLE_SECONDS = 0.002

#: No method that is worth a row takes longer.
_TIMEOUT_SECONDS = 900.0

_KINDS = ("RssAnon", "RssFile", "RssShmem")
_FIELD = re.compile(rb"^(RssAnon|RssFile|RssShmem|VmHWM):\s+(\d+) kB$", re.MULTILINE)


def _status(pid: int) -> dict[str, int]:
    """Return the resident memory of a process by kind, in bytes; empty when it has gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as stream:
            text = stream.read()
    except ProcessLookupError:
        return {}
    return {key.decode(): int(kib) << 10 for key, kib in _FIELD.findall(text)}


class _Sampler:
    """Keeps the peak of each kind of memory of a process, and of their sum, until it is stopped."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped = threading.Event()
        self.baseline = _status(pid)
        self.peaks = dict.fromkeys((*_KINDS, "total"), 0)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._look()
            time.sleep(_SAMPLE_SECONDS)

    def _look(self) -> None:
        status = _status(self._pid)
        if not all(kind in status for kind in _KINDS):
            return
        for kind in _KINDS:
            self.peaks[kind] = max(self.peaks[kind], status[kind])
        self.peaks["total"] = max(self.peaks["total"], sum(status[kind] for kind in _KINDS))

    def stop(self, *, exact_peak: bool) -> dict[str, int]:
        """Stop and return growth in bytes; with ``exact_peak`` the kernel's own high-water mark counts too."""
        self._stopped.set()
        self._thread.join()
        self._look()
        if exact_peak:
            self.peaks["total"] = max(self.peaks["total"], _status(self._pid).get("VmHWM", 0))
        before = {**self.baseline, "total": sum(self.baseline.get(kind, 0) for kind in _KINDS)}
        return {kind: max(0, peak - before.get(kind, 0)) for kind, peak in self.peaks.items()}


def run_job(job: Job, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> Outcome:
    """Run a job in a fresh process and return what became of it; never raises for what the job does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "sluice.benchmark._child", json.dumps(dataclasses.asdict(job))],
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
                outcome = _converse(process, verify=job.verify)
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


def _converse(process: subprocess.Popen[str], *, verify: bool) -> Outcome:
    """Take a job through its protocol. An outcome that is ``killed`` means that the process ended without a word."""
    ready = _listen(process)
    if ready["event"] != "ready":
        return Outcome(status=ready["event"], reason=ready.get("reason", ""))
    sampler = _Sampler(process.pid)
    _answer(process)
    loaded = _listen(process)
    growth = sampler.stop(exact_peak=ready["peak_was_reset"])
    outcome = Outcome(
        status="ok" if loaded["event"] == "loaded" else loaded["event"],
        reason=loaded.get("reason", ""),
        seconds=loaded.get("seconds", 0.0),
        anon_bytes=growth["RssAnon"],
        file_bytes=growth["RssFile"],
        shmem_bytes=growth["RssShmem"],
        total_bytes=growth["total"],
        device_allocated_bytes=loaded.get("device_allocated_bytes", 0),
        device_reserved_bytes=loaded.get("device_reserved_bytes", 0),
    )
    if outcome.status != "ok":
        return outcome
    _answer(process)
    return _verified(outcome, _listen(process)) if verify else outcome


def _verified(outcome: Outcome, message: dict[str, Any]) -> Outcome:
    if message["event"] == "nothing to verify":
        return outcome
    if message["event"] != "verified":
        return dataclasses.replace(outcome, status=message["event"], reason=message.get("reason", ""))
    verdict = message["verdict"]
    return dataclasses.replace(outcome, verdict=Verdict(weights=verdict["weights"], logits=tuple(verdict["logits"])))


def _listen(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    return cast("dict[str, Any]", json.loads(line)) if line else {"event": "killed"}


def _answer(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died while we looked; the next line read from it says so
        os.write(process.stdin.fileno(), b"\n")


def _last_words(returncode: int, complaints: IO[bytes]) -> str:
    """Say why a process ended: its signal, or the last line that it wrote."""
    if returncode == -signal.SIGKILL:
        return "killed by the system: out of memory"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {returncode}"
