"""A child process that says when it is ready and when it is done, and whose memory is sampled in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any, cast

from sluice.benchmark.watching import Watcher

__all__ = ["Row", "run_watched"]

#: Longest time of one process.
_TIMEOUT_SECONDS = 900

Row = dict[str, Any]


def run_watched(module: str, job: Row) -> Row:
    """Run a module with a job; return the events that it prints and its ``peak`` in bytes, or why it ``failed``.

    Args:
        module: It prints three events as JSON, and reads a line after the first (ready) and the second (loaded).
        job: Its argument, as JSON.
    """
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=dict(os.environ),
            text=True,
        )
        timer = threading.Timer(_TIMEOUT_SECONDS, process.kill)
        timer.start()
        with process:
            try:
                found = _converse(process)
            finally:
                timer.cancel()
                process.kill()
        return found if found is not None else {"failed": _last_line(complaints)}


def _converse(process: subprocess.Popen[str]) -> Row | None:
    """Return what a process printed, and its peak; None if it fails."""
    ready = _listen(process)
    if ready is None:
        return None
    watcher = Watcher(process.pid)
    _answer(process)
    loaded = _listen(process)
    peaks, _ = watcher.stop(exact_peak=ready["exact"])
    if loaded is None:
        return None
    _answer(process)
    checked = _listen(process)
    if checked is None:
        return None
    return {**loaded, **checked, "peak": peaks.total, "anonymous": peaks.anon}


def _listen(process: subprocess.Popen[str]) -> Row | None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"event"'):  # libraries print too
            return cast("Row", json.loads(line))
    return None


def _answer(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _last_line(complaints: IO[bytes]) -> str:
    complaints.seek(0)
    return (complaints.read().decode(errors="replace").strip().splitlines() or ["killed"])[-1]
