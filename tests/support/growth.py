"""Measure how much memory one call takes, from outside the process that makes it.

Each call has a process of its own, whose heap has nothing freed to hide growth in. This process resets the kernel's
record of the peak (``VmHWM``, proc(5)) when everything before the call is done, and reads it while the call runs and
when it has returned. sluice resets the record too when a load starts, so that one reading at the end is not enough.
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from support.fresh_process import SUBPROCESS

#: Seconds between two readings of the record.
_INTERVAL = 0.005

#: Imports the cases and prepares one; makes the call when it reads a line, and prints its outcome at the next.
_CHILD = """
import json, sys
from {module} import {table}
call = {table}[sys.argv[1]].prepare(*json.loads(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
outcome = call()
print("done", flush=True)
sys.stdin.readline()
print(json.dumps([outcome.predicted_bytes, outcome.reported_bytes, *outcome.sizes()]), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a call; it keeps the finished tensors until the peak was read."""

    #: Growth that the report predicts, in bytes; None if it predicts none.
    predicted_bytes: int | None = None
    #: Growth that the report has measured, in bytes; None if it measures none.
    reported_bytes: int | None = None
    #: Returns the new tensors in host memory; several names of one tensor count once.
    new: Callable[[], Iterable[torch.Tensor]] = tuple
    #: Shapes of tensors that took no new memory: those of a file that was written, and existing parameters.
    moved: Iterable[tuple[int, ...]] = ()
    #: Allowance for each tensor, in bytes.
    tensor_bytes: int = 2048

    def sizes(self) -> tuple[int, int]:
        """Return F, and the allowance for the tensors and for those of 1 MiB or more, in bytes."""
        new = {id(tensor): tensor.nbytes for tensor in self.new()}
        every = [*new.values(), *(4 * torch.Size(shape).numel() for shape in self.moved)]
        large = sum(nbytes >= 1 << 20 for nbytes in every)
        return sum(new.values()), self.tensor_bytes * len(every) + 8192 * large


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory of one call, in bytes."""

    #: Growth to the peak, all kinds of memory together.
    measured_bytes: int
    #: Growth that the report predicts; None if it predicts none.
    predicted_bytes: int | None
    #: Growth that the report has measured; None if it measures none.
    reported_bytes: int | None
    #: Bytes of the finished tensors: F.
    final_bytes: int
    #: Allowance of the contract in addition to F and staging.
    overhead_bytes: int

    def allowed_bytes(self, staging_bytes: int) -> int:
        """Return the growth that the contract allows."""
        return self.final_bytes + staging_bytes + self.overhead_bytes


def measure_growth(
    module: str, table: str, case: str, *arguments: object, env: Mapping[str, str] | None = None
) -> Growth:
    """Make the call of a case in a fresh process, and return the memory that it took.

    Args:
        module: Name of the module that has the cases.
        table: Name of the table of cases in it, whose values have a method ``prepare`` that returns a call.
        case: Name of the case.
        arguments: Arguments of ``prepare``.
        env: Environment of the process; None for that of this process.
    """
    command = [sys.executable, "-c", _CHILD.format(module=module, table=table), case, json.dumps(arguments)]
    pipes = SUBPROCESS.PIPE
    with SUBPROCESS.Popen(command, stdin=pipes, stdout=pipes, text=True, env=env) as process:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{case} could not be prepared")
        Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
        before = _status(process.pid)["VmRSS"]
        process.stdin.write("go\n")
        process.stdin.flush()
        peak = _peak_until(process.pid, lambda: bool(select.select([process.stdout], [], [], _INTERVAL)[0]))
        done = process.stdout.readline()
        if done:
            process.stdin.write("end\n")
            process.stdin.flush()
        answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"{case} failed")
    predicted, reported, final, tensors = json.loads(answer)
    return Growth(
        measured_bytes=peak - before,
        predicted_bytes=predicted,
        reported_bytes=reported,
        final_bytes=final,
        overhead_bytes=(32 << 20) + tensors,
    )


def _peak_until(pid: int, ended: Callable[[], bool]) -> int:
    peak = 0
    while True:
        done = ended()
        peak = max(peak, _status(pid).get("VmHWM", 0))
        if done:
            return peak


def _status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS") if name in fields}
