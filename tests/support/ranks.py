"""Processes that form a gloo process group on this host, and run functions as its ranks.

``Ranks`` starts them once and keeps them: a group of four takes seconds to start, a function milliseconds. A test takes
the fixture ``two_ranks`` or ``four_ranks``, which keeps a group for the session; a test that kills a rank or breaks the
group starts one of its own.

Functions and their arguments are pickled, so that a function is defined at the top of a module of ``support`` or of a
test. It runs on every rank at once; ``torch.distributed`` says which rank it is.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

import sluice

#: Seconds until a function that does not return is ended: less than the timeout of a test.
_TIMEOUT = 120.0

#: Seconds after which a collective fails by itself. A test that waits for it has found a hang.
_GROUP_TIMEOUT = 100.0


class Ranks:
    """A process group of ``size`` processes; use it as a context manager."""

    def __init__(self, size: int) -> None:
        """Start the processes; the group is complete when ``run`` is first called."""
        self.size = size
        self._directory = tempfile.mkdtemp(prefix="ranks-")
        # A server that has imported torch forks them: an interpreter for each would take seconds on two cores.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "sluice"])
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._directory, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *arguments: object, timeout: float = _TIMEOUT) -> list[Any]:
        """Call ``function(*arguments)`` on every rank and return the results in the order of ranks.

        Raises:
            AssertionError: It raised on some ranks, a rank died, or a rank did not return in time.
        """
        outcomes = self.outcomes(function, *arguments, timeout=timeout)
        errors = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(outcomes) if not ok]
        if errors:
            raise AssertionError("\n".join(errors))
        return [value for _, value in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *arguments: object, timeout: float = _TIMEOUT
    ) -> list[tuple[bool, Any]]:
        """Call a function on every rank; return for each whether it returned, and its result or its traceback."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, arguments))
        until = time.monotonic() + timeout
        outcomes = [self._outcome(rank, until) for rank in range(self.size)]
        # Until the next call: the threads of the group wake a hundred times a second.
        self._signal(signal.SIGSTOP)
        return outcomes

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def _outcome(self, rank: int, until: float) -> tuple[bool, Any]:
        try:
            if self._pipes[rank].poll(max(0.0, until - time.monotonic())):
                outcome: tuple[bool, Any] = self._pipes[rank].recv()
                return outcome
        except (EOFError, ConnectionError):
            self.processes[rank].join()
            return False, f"the process ended with exit code {self.processes[rank].exitcode}"
        return False, "the function did not return in time"

    def close(self) -> None:
        """End the processes."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.5)
            process.kill()  # one that waits in a collective does not see that its pipe was closed
            process.join()
            process.close()
        shutil.rmtree(self._directory)

    def __enter__(self) -> Self:
        """Return the group."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self.close()


def failure(function: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return the text of the error of a call; empty if it returns."""
    try:
        function(*arguments, **options)
    except sluice.SluiceError as error:
        return str(error)
    return ""


def _serve(rank: int, size: int, directory: str, pipe: Connection) -> None:
    """Join the group and run functions until the pipe is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_GROUP_TIMEOUT),
    )
    _keep_meshes()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            outcome = True, function(*arguments)
        except BaseException:  # noqa: BLE001  the test gets it as text
            outcome = False, traceback.format_exc()
        pipe.send(outcome)
    dist.destroy_process_group()


def _keep_meshes() -> None:
    """Make every function get the same mesh of a shape, and so the same groups.

    Each group has threads that wake a hundred times a second, and torch's caches keep old meshes alive.
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh
    from torch.distributed import tensor as dtensor

    kept = cache(device_mesh.init_device_mesh)
    for module in (device_mesh, dist, dtensor):
        module.__dict__["init_device_mesh"] = kept
