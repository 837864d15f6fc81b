"""The raw client of ``bench.remote``, and the server's process."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from msgspec import Struct

from bench._remote_server import COUNTS

__all__ = ["Span", "huge_memory", "in_parallel", "receive", "serving", "spans", "taken_counts"]


class Span(Struct, frozen=True):
    """A range of a file of a server, and its place in the memory of the receiver."""

    path: str
    begin: int
    nbytes: int
    target: int


def spans(files: Sequence[tuple[str, int]], request_bytes: int) -> list[Span]:
    """Divide files, given by path and size, into requests; their bytes follow each other in memory."""
    made, target = [], 0
    for path, size in files:
        for begin in range(0, size, request_bytes):
            nbytes = min(request_bytes, size - begin)
            made.append(Span(path, begin, nbytes, target))
            target += nbytes
    return made


def huge_memory(nbytes: int) -> mmap:
    """Return anonymous memory of huge pages, the cheapest to fill."""
    memory = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    memory.madvise(MADV_HUGEPAGE)
    return memory


def in_parallel(work: Callable[[Iterator[Span]], None], todo: Sequence[Span], threads: int) -> None:
    """Run a function in threads, each with an iterator over the ranges that the others have not taken.

    Raises:
        RuntimeError: A thread failed.
    """
    queue: SimpleQueue[Span] = SimpleQueue()
    for span in todo:
        queue.put(span)

    def left() -> Iterator[Span]:
        while True:
            try:
                yield queue.get_nowait()
            except Empty:
                return

    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(left())
        except BaseException as error:  # noqa: BLE001  (raised by the caller)
            errors.append(error)

    started = [Thread(target=run) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise RuntimeError(f"a connection failed: {errors[0]!r}") from errors[0]


def receive(port: int, todo: Sequence[Span], memory: memoryview, *, connections: int = 16) -> None:
    """Receive ranges into memory with the client of the standard library, the fastest one in Python.

    Raises:
        RuntimeError: An answer is not the range.
    """

    def work(mine: Iterator[Span]) -> None:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            for span in mine:
                client.request(
                    "GET", span.path, headers={"Range": f"bytes={span.begin}-{span.begin + span.nbytes - 1}"}
                )
                answer = client.getresponse()
                done = 0
                while done < span.nbytes:
                    found = answer.readinto(memory[span.target + done : span.target + span.nbytes])
                    if not found or answer.status != 206:
                        raise RuntimeError(f"{span}: status {answer.status}, {done} bytes")
                    done += found
                answer.read()
        finally:
            client.close()

    in_parallel(work, todo, connections)


@contextmanager
def serving(root: Path, *, latency: float = 0.0, rate: float = 0.0) -> Iterator[int]:
    """Run the server in a process of its own; yield the port."""
    command = [sys.executable, "-m", "bench._remote_server", str(root), "--latency", str(latency), "--rate", str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def taken_counts(port: int) -> dict[str, Any]:
    """Return the requests, bytes and CPU seconds of the server since this was last called."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}{COUNTS}", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
