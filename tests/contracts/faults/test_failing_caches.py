"""Loads through a cache directory: servers and disks that fail, processes that are killed or load at the same time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")

import sluice
from sluice import _defaults as defaults
from sluice.sources.remote.cache_files import OpenFiles
from sluice.testing import memory_limit_refusal, run_limited
from support.cached_objects import cached_bytes, entries
from support.range_server import RangeServer, cut, headers, status

STATE = {f"weight{number}": torch.arange(number, 200_000 + number).reshape(400, 500) for number in range(4)}

#: Program that reads a whole object through a cache; with a third argument it dies at that call of ``pwrite``.
LOAD = """
import os, signal, sys
from sluice.sources.opening import open_source
from sluice.sources.remote.location import Remote
url, cache, *at = sys.argv[1:]
if at:
    right, calls = os.pwrite, iter(range(1 << 30))
    def pwrite(descriptor, data, offset):
        if next(calls) == int(at[0]):
            right(descriptor, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return right(descriptor, data, offset)
    os.pwrite = pwrite
source = open_source(Remote(url, cache=cache))
buffer = memoryview(bytearray(source.identity.nbytes))
for offset in range(0, len(buffer), 300_000):
    part = buffer[offset : offset + 300_000]
    assert source.read_into(offset, part) == len(part)
source.close()
print(hash(bytes(buffer)), type(source).__name__)
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setattr(defaults, "REMOTE_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(defaults, "REMOTE_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(defaults, "REMOTE_READ_BYTES", 1 << 20)
    monkeypatch.setattr(defaults, "REMOTE_LINE_BYTES", 0)  # the same size for any latency
    with RangeServer({"/m": safetensors.torch.save(STATE)}) as running:
        yield running


def is_right(loaded: dict[str, torch.Tensor]) -> bool:
    return loaded.keys() == STATE.keys() and all(torch.equal(loaded[name], STATE[name]) for name in STATE)


def load(server: RangeServer, cache: Path) -> dict[str, torch.Tensor]:
    return sluice.load_state_dict(sluice.Remote(server.url("/m"), cache=cache))


@pytest.mark.parametrize(
    "fault", ["reset", *(pytest.param(each, marks=pytest.mark.long) for each in ("503", "truncated", "changed"))]
)
def test_a_server_that_fails_at_any_request_leaves_a_cache_that_is_right(
    server: RangeServer, tmp_path: Path, fault: str
) -> None:
    faults = {
        "503": status(503),
        "reset": cut(100_000, "reset"),
        "truncated": cut(70_000, "close"),
        "changed": headers(ETag='"other"'),
    }
    for at in range(8):
        server.requests.clear()
        server.faults = {at: faults[fault]}
        try:
            assert is_right(load(server, tmp_path / str(at)))
        except sluice.SourceChangedError:
            assert fault == "changed"
        server.faults = {}
        for _ in range(2):
            assert is_right(load(server, tmp_path / str(at)))


def test_a_full_disk_is_noted_and_the_load_succeeds(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = OpenFiles.write

    def write(files: OpenFiles, offset: int, data: memoryview) -> None:
        if offset > 2_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        right(files, offset, data)

    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.empty_like(tensor), requires_grad=False) for name, tensor in STATE.items()}
    )
    with monkeypatch.context() as patch:
        patch.setattr(OpenFiles, "write", write)
        report = sluice.load_into(model, sluice.Remote(server.url("/m"), cache=tmp_path))
    assert any("not completely cached: No space left on device" in note for note in report.notes)
    assert all(torch.equal(model[name], STATE[name]) for name in STATE)
    server.requests.clear()
    assert is_right(load(server, tmp_path))
    assert min(int(each.headers["Range"][6:].partition("-")[0]) for each in server.requests[1:]) > 1_000_000


def test_a_process_that_is_killed_in_the_middle_of_a_write_leaves_no_wrong_bytes(
    server: RangeServer, tmp_path: Path
) -> None:
    for at in (1, 20):
        done = subprocess.run([sys.executable, "-c", LOAD, server.url("/m"), tmp_path, str(at)], check=False)
        assert done.returncode == -signal.SIGKILL
    server.requests.clear()
    assert is_right(load(server, tmp_path))
    assert server.requests[1:]
    server.requests.clear()
    assert is_right(load(server, tmp_path))
    assert len(server.requests) == 1


def test_processes_that_fill_one_entry_at_once_are_right_and_leave_it_complete(
    server: RangeServer, tmp_path: Path
) -> None:
    server.bandwidth = 20e6
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", LOAD, server.url("/m"), str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert len({digest for digest, _ in outputs}) == 1
    assert [each.returncode for each in processes] == [0, 0, 0]
    server.requests.clear()
    assert is_right(load(server, tmp_path))
    assert len(server.requests) == 1
    assert len(entries(tmp_path)) == 1
    assert cached_bytes(tmp_path) < len(server.files["/m"]) + (64 << 10)


#: Program that loads a URL, through a cache if there is a second argument, and prints whether the values are right.
LIMITED = """
import sys, torch, sluice
url, *cache = sys.argv[1:]
loaded = sluice.load_state_dict(sluice.Remote(url, cache=cache[0]) if cache else url)
print(all(bool((tensor == int(name[1:])).all()) for name, tensor in loaded.items()))
"""


@pytest.mark.long
@pytest.mark.skipif(memory_limit_refusal() is not None, reason="control groups cannot be made here")
def test_bytes_on_their_way_to_the_disk_do_not_exceed_a_control_group(server: RangeServer, tmp_path: Path) -> None:
    state = {f"w{number}": torch.full((4 << 20,), number) for number in range(16)}  # 512 MiB
    server.files["/m"] = safetensors.torch.save(state)
    program = [sys.executable, "-c", LIMITED, server.url("/m")]
    needed = run_limited(program, 4 << 30).peak_bytes
    assert needed is not None
    done = run_limited([*program, str(tmp_path)], needed + (32 << 20))
    assert done.stdout == "True\n"
    assert not done.oom_killed


#: Program that reads random ranges of six objects with three threads each, and compares them; prints after each object.
RANDOM = """
import random, sys
from functools import partial
from pathlib import Path
from sluice._threads import Workers
from support.cached_objects import VersionedObject, content, opened, read

def compare(source, right, seed):
    numbers = random.Random(seed)
    for _ in range(numbers.randrange(1, 6)):
        start = numbers.randrange(len(right))
        nbytes = numbers.randrange(1, len(right) - start + 1)
        assert read(source, start, nbytes) == right[start : start + nbytes]
    if numbers.random() < 0.4:
        assert read(source, 0, len(right)) == right

cache, bound, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
numbers = random.Random(seed)
objects = [content(1_000_000 + 70_000 * number, number) for number in range(6)]
for _ in range(12):
    number = numbers.randrange(6)
    remote = VersionedObject(objects[number], path=f"https://host/{number}")
    if numbers.random() < 0.2:
        remote.longest = numbers.randrange(66_000, 300_000)
    source = opened(remote, cache, bound)
    with Workers(3, "reader") as workers:
        tasks = [workers.start(partial(compare, source, remote.content, numbers.random())) for _ in range(3)]
        for task in tasks:
            task.result()
    source.close()
    print("one", flush=True)
print("all", flush=True)
"""


@pytest.mark.long
def test_processes_that_fill_read_and_remove_at_once_are_right_and_keep_the_bound(tmp_path: Path) -> None:
    bound, ended = 4_000_000, 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for first in range(0, 12, 4):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANDOM, tmp_path, str(bound), str(first + number)],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for number in range(4)
        ]
        assert processes[0].stdout is not None
        processes[0].stdout.readline()  # in the middle of its second object, it is killed
        processes[0].kill()
        outputs = [process.communicate(timeout=100)[0] for process in processes]
        assert [process.returncode for process in processes] == [-signal.SIGKILL, 0, 0, 0]
        ended += sum(output.endswith(b"all\n") for output in outputs)
        assert cached_bytes(tmp_path) <= bound
    assert ended == 9
