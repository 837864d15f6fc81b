"""Interrupts, signals and failing callbacks at any point of a load: threads end, files close, state is reported."""

from __future__ import annotations

import functools
import gc
import math
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import sluice
from sluice._threads import Worker, join_threads, start_threads
from support.leaks import Holdings, open_files
from support.waiting import PATIENCE_SECONDS, wait_until
from support.wide_tensors import module, tensors


class Terminated(BaseException):
    """Raised by the handler of SIGTERM."""


def interrupt() -> None:
    raise KeyboardInterrupt


def fail() -> None:
    raise RuntimeError("the callback failed")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def _handler() -> object:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_handler")
@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
@pytest.mark.parametrize("action", [interrupt, fail, terminate], ids=lambda action: action.__name__)
def test_a_callback_that_raises_at_any_event(file: Path, action: Callable[[], None], live: bool) -> None:
    descriptors, threads = open_files(), threading.active_count()
    for at in range(1, 100):
        model, events = module(live=live), 0

        def progress(_: sluice.ProgressEvent) -> None:
            nonlocal events
            events += 1
            if events == at:  # noqa: B023 - called in this round only
                action()

        try:
            sluice.load_into(model, file, progress=progress)
        except sluice.PartialLoadError as error:
            assert live
            assert {*error.done, *error.torn, *error.untouched} == tensors().keys()
            for name in error.done:
                assert torch.equal(model[name].detach(), tensors()[name])
            for name in error.untouched:
                assert not model[name].any()
        except (KeyboardInterrupt, Terminated) as error:
            told = "done" in "".join(getattr(error, "__notes__", []))
            assert told == live
        except RuntimeError as error:
            assert str(error) == "the callback failed"
            assert not live
        else:
            assert events < at
            break
        assert threading.active_count() == threads
        assert open_files() == descriptors
        assert live or all(tensor.is_meta for tensor in model.values())
    assert at > 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files of psutil, closed by Python
@pytest.mark.timeout(method="thread")  # the other method uses the timer that this test needs
@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("verb", ["load_into", "load_state_dict"])
def test_an_interrupt_at_any_moment_leaves_nothing_behind(file: Path, count: int, verb: str) -> None:
    """Ctrl-C is handled between any two instructions of the caller's thread, also outside of callbacks."""
    choose = random.Random(3)
    _load(file, verb)  # one-time initialization takes long, and interrupts should not wait for it
    before = Holdings.now()
    seconds = math.inf
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        started = time.perf_counter()
        if seconds == math.inf or outcomes["late"]:
            _load(file, verb)  # the duration is measured again, because other work on the machine changes it
            seconds = min(seconds, time.perf_counter() - started)
        outcomes[_interrupted(file, verb, choose.uniform(0, seconds))] += 1
    print(f"\n{count} interrupts of {verb}: {dict(outcomes)}")
    assert outcomes["interrupted"]
    assert outcomes["lost"] <= 1 + count // 50
    gc.collect()
    assert before.left_behind() == []


def _load(file: Path, verb: str) -> None:
    if verb == "load_into":
        model = module(live=False)
        sluice.load_into(model, file)
        assert torch.equal(model["w2"].detach(), tensors()["w2"])
    else:
        assert torch.equal(sluice.load_state_dict(file)["w2"], tensors()["w2"])


def _interrupted(file: Path, verb: str, seconds: float) -> str:
    """Interrupt one load; return whether that came before its end, after it, or inside of a finalizer.

    Python only prints exceptions that are raised in a finalizer.
    """
    finished = False
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds + 1e-6)
        _load(file, verb)
        finished = True
        time.sleep(seconds + 0.1)  # the interrupt arrives here at the latest
    except KeyboardInterrupt:
        return "late" if finished else "interrupted"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return "lost"


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupt_while_threads_are_joined_waits_for_them(count: int) -> None:
    release, handled = threading.Event(), threading.Event()
    threads: list[Worker] = []
    caller = threading.main_thread().ident
    assert caller is not None

    def work() -> None:
        release.wait(PATIENCE_SECONDS)

    def interrupt(_: int, __: object) -> None:
        handled.set()
        raise KeyboardInterrupt

    def interrupt_and_release() -> None:
        joining = Worker.finish.__code__
        wait_until(lambda: sys._current_frames()[caller].f_code is joining, "the threads are being joined")
        # A real signal: _thread.interrupt_main() does not wake a thread that waits for a lock.
        signal.pthread_kill(caller, signal.SIGINT)
        handled.wait(PATIENCE_SECONDS)
        release.set()

    start_threads(threads, count, work, "test")
    kept = list(threads)
    other = threading.Thread(target=interrupt_and_release)
    before = signal.signal(signal.SIGINT, interrupt)  # a background job of a shell ignores it
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            join_threads(threads)
    finally:
        other.join()
        signal.signal(signal.SIGINT, before)
    assert handled.is_set()
    assert release.is_set()
    assert not any(thread.is_alive() for thread in kept)


def test_a_thread_that_an_interrupt_kept_from_starting_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.zeros(1)
    alive = weakref.ref(held)
    threads: list[Worker] = []
    monkeypatch.setattr(Worker, "start", lambda _: interrupt())
    with pytest.raises(KeyboardInterrupt):
        start_threads(threads, 1, functools.partial(str, held), "test")  # type: ignore[arg-type]
    join_threads(threads)
    del held
    assert alive() is None


def test_descriptors_of_an_unclosed_checkpoint_are_released(file: Path) -> None:
    before = open_files()
    checkpoint = sluice.open(file)
    checkpoint["w1"].read()
    assert open_files() != before
    del checkpoint
    gc.collect()
    assert open_files() == before
