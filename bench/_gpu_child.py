"""Tasks of ``bench.gpu`` that run in a separate process: ``python -m bench._gpu_child TASK``.

The last line of standard output is the result as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from bench import _puzzle as puzzle
from bench._puzzle import Puzzle

__all__ = ["run_task"]

_ROOT = Path(__file__).resolve().parents[1]

#: Size of one copy: sluice's default staging.
_COPY_BYTES = 64 << 20

#: Number of copies; the fastest is the limit.
_COPIES = 4


def run_task(task: Mapping[str, object], *, timeout_seconds: float) -> dict[str, Any]:
    """Run a task in a fresh process and return its result; ``{"reason": ...}`` if it failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench._gpu_child", json.dumps(task)],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=max(1.0, timeout_seconds),
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"stopped after {timeout_seconds:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"reason": lines[-1] if lines else f"ended with exit code {done.returncode}"}
    return cast("dict[str, Any]", json.loads(done.stdout.strip().splitlines()[-1]))


def _pinned_copy(nbytes: int) -> dict[str, Any]:
    """Copy ``nbytes`` bytes from page-locked memory to the device; return the seconds of the fastest attempt."""
    staging = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    tries = []
    for _ in range(_COPIES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for piece in torch.split(target, _COPY_BYTES):
            piece.copy_(staging[: len(piece)], non_blocking=True)
        torch.cuda.synchronize()
        tries.append(time.perf_counter() - begin)
    return {"seconds": min(tries), "bytes": nbytes}


def main() -> None:
    """Run one task and print its result."""
    task = json.loads(sys.argv[1])
    if task["task"] == "pinned-copy":
        result = _pinned_copy(task["bytes"])
    else:
        size = Puzzle(layers=task["layers"], width=task["width"])
        result = puzzle.load(task["path"], size, task["device"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
