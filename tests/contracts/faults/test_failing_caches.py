"""Loads through a cache directory: servers and disks that fail, processes that are killed."""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")


import sluice
from sluice import _defaults as defaults
from sluice.testing import memory_limit_refusal, run_limited
from support.cached_objects import entries, parts
from support.fresh_process import SUBPROCESS
from support.range_server import RangeServer, cut, headers, status
from support.watching import watch

STATE = {f"weight{number}": torch.arange(number, 200_000 + number).reshape(400, 500) for number in range(4)}

#: Program that loads a URL through a cache in small pieces; prints when it begins.
KILLED = """
import sys, torch, sluice
from sluice import _defaults
_defaults.CACHE_PIECE_BYTES = 1 << 18
print("begins", flush=True)
sluice.load_state_dict(sluice.Remote(sys.argv[1], cache=sys.argv[2]))
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setattr(defaults, "REMOTE_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(defaults, "REMOTE_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(defaults, "REMOTE_READ_BYTES", 1 << 20)
    monkeypatch.setattr(defaults, "CACHE_PIECE_BYTES", 1 << 18)
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
    def full(_descriptor: int, _data: memoryview, offset: int) -> None:
        if offset > 2_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.empty_like(tensor), requires_grad=False) for name, tensor in STATE.items()}
    )
    with monkeypatch.context() as patch:
        watch(patch, os, "pwrite", full)
        report = sluice.load_into(model, sluice.Remote(server.url("/m"), cache=tmp_path))
    assert any("not cached: No space left on device" in note for note in report.notes)
    assert all(torch.equal(model[name], STATE[name]) for name in STATE)
    assert is_right(load(server, tmp_path))
    server.requests.clear()
    assert is_right(load(server, tmp_path))
    assert len(server.requests) == 1


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.long)])
def test_loads_that_are_killed_at_random_times_leave_a_cache_that_is_right(
    server: RangeServer, tmp_path: Path, rounds: int
) -> None:
    """Kill loads at random times, flip a byte of what they left now and then, and compare what the next one loads."""
    server.bandwidth = 2e6
    numbers = random.Random(rounds)
    command = [sys.executable, "-c", KILLED, server.url("/m"), str(tmp_path)]
    for _ in range(rounds):
        with SUBPROCESS.Popen(command, stdin=SUBPROCESS.PIPE, stdout=SUBPROCESS.PIPE, text=True) as process:
            process.stdout.readline()  # imports are done
            time.sleep(numbers.uniform(0.0, 0.6))
            process.kill()
        left = entries(tmp_path) + parts(tmp_path)
        if left and left[0].stat().st_size and numbers.random() < 0.4:
            with left[0].open("r+b") as file:
                file.seek(numbers.randrange(left[0].stat().st_size))
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))
        if numbers.random() < 0.3:
            server.bandwidth = None
            assert is_right(load(server, tmp_path))
            server.bandwidth = 2e6
            for path in entries(tmp_path) if numbers.random() < 0.7 else ():
                path.unlink()
    server.bandwidth = None
    assert is_right(load(server, tmp_path))


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
