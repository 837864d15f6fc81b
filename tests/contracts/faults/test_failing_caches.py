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
from sluice import _options as options
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
    monkeypatch.setattr(options, "REMOTE_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(options, "REMOTE_READ_BYTES", 1 << 20)
    with RangeServer({"/m": safetensors.torch.save(STATE)}) as running:
        yield running


def is_right(loaded: dict[str, torch.Tensor]) -> bool:
    return loaded.keys() == STATE.keys() and all(torch.equal(loaded[name], STATE[name]) for name in STATE)


def load(server: RangeServer, cache: Path) -> dict[str, torch.Tensor]:
    return sluice.load_state_dict(sluice.Remote(server.url("/m"), cache=cache))


@pytest.mark.parametrize(
    "fault", ["reset", "changed", *(pytest.param(each, marks=pytest.mark.long) for each in ("503", "truncated"))]
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
    for at in (1, 9, 30):
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
