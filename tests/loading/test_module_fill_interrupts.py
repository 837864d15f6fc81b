"""Ctrl-C, SIGTERM and failing callbacks at any point: threads are joined, and the state is reported."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from support import fresh_process


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def empty() -> nn.Module:
    with sluice.empty_init():
        return net()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(net().state_dict(), tmp_path / "f.pth")
    return tmp_path / "f.pth"


class Stop(BaseException):
    """Derives from BaseException, so that handlers of Exception do not catch it."""


@pytest.mark.parametrize("kind", [ValueError, Stop])
def test_whichever_event_a_callback_fails_at(kind: type[BaseException], file: Path) -> None:
    expected = torch.load(file)
    for k in range(1, 100):
        for model in (empty(), net()):
            live = not model.get_parameter("0.weight").is_meta
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            events: list[sluice.ProgressEvent] = []

            def callback(event: sluice.ProgressEvent, events: list[sluice.ProgressEvent] = events, k: int = k) -> None:
                events.append(event)
                if len(events) == k:
                    raise kind("stop")

            try:
                sluice.load_into(model, file, progress=callback)
            except (kind, sluice.PartialLoadError) as error:
                text = "\n".join([str(error), *getattr(error, "__notes__", [])])
                assert not live or "live tensors began to change" in text
                assert isinstance(error, sluice.PartialLoadError) == (live and kind is ValueError)
                if not live:
                    assert all(tensor.is_meta for tensor in model.state_dict().values())
                for name, tensor in model.state_dict().items() if live else ():
                    if isinstance(error, sluice.PartialLoadError) and name in error.done:
                        assert torch.equal(tensor, expected[name])
                    if isinstance(error, sluice.PartialLoadError) and name in error.untouched:
                        assert torch.equal(tensor, before[name])
            else:
                assert k > 1
                return
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("sluice-")]
    pytest.fail("the load never succeeded")


_SIGNALLED = """
import os, signal, sys, threading, torch, sluice

path, number = sys.argv[1], int(sys.argv[2])
# Interrupts may be ignored in a background process.
signal.signal(number, (lambda *_: sys.exit(9)) if number == signal.SIGTERM else signal.default_int_handler)
real, lock = os.preadv, threading.Lock()

def net():
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))

def preadv(descriptor, buffers, offset, flags=0):
    global calls
    found = real(descriptor, buffers, offset, flags)
    if found > 60_000:
        with lock:
            calls += 1
            if calls == k:
                os.kill(os.getpid(), number)
    return found

os.preadv = preadv
for k in (1, 2, 4):
    for live in (False, True):
        with sluice.empty_init():
            model = net()
        model = net() if live else model
        calls = 0
        try:
            sluice.load_into(model, path)
        except BaseException as error:
            left = [thread.name for thread in threading.enumerate() if thread.name.startswith("sluice")]
            on_meta = {tensor.is_meta for tensor in model.state_dict().values()}
            assert not left, left
            assert on_meta == {not live}, on_meta
            assert not live or "live tensors began to change" in error.__notes__[0]
            print(type(error).__name__)
        else:
            print(f"loaded: k = {k}, {live = }, {calls = }")
"""


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SystemExit")])
def test_signals_reach_the_caller_with_every_thread_joined(number: int, name: str, file: Path) -> None:
    done = fresh_process.run(_SIGNALLED, file, int(number))
    assert done.stdout.splitlines() == [name] * 6, done.stderr
