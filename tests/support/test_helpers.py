"""Helpers of tests: the check for leaks, the counter of work, and fresh processes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading

import pytest

from support import fresh_process
from support.leaks import Holdings
from support.work import at_most


def test_what_is_left_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.leaks._THREAD_GRACE", 0.1)
    before = Holdings.now()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    with tempfile.NamedTemporaryFile() as file:
        left = before.left_behind()
    os.close(descriptor)
    stop.set()
    thread.join()
    assert f"open descriptor: {os.devnull}" in left
    assert "running thread: forgotten" in left
    assert f"temporary file: {os.path.basename(file.name)}" in left
    assert before.left_behind() == []


def lines(count: int) -> None:
    for _ in range(count):
        pass


def test_lines_are_counted() -> None:
    with at_most(2020):
        lines(1000)
    with pytest.raises(pytest.fail.Exception, match="more than 1,990 steps"), at_most(1990):
        lines(1000)
    assert sys.gettrace() is None


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import sys; sys.exit('why')", 1, "why"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import sluice, sys; sluice.mine = sys.mine = 1; sys.exit(7)", 7, ""),
    ],
)
def test_a_fresh_process_ends_as_an_interpreter_and_leaves_nothing_to_the_next(
    code: str, status: int, said: str
) -> None:
    done = fresh_process.run(code)
    assert done.returncode == status
    assert said in done.stderr
    done = fresh_process.run("import sluice, sys; print(hasattr(sluice, 'mine'), hasattr(sys, 'mine'), __name__)")
    assert done.stdout == "False False __main__\n"
