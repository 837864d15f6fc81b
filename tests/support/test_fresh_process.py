"""Fresh processes behave as separate interpreters, and do not affect the server."""

from __future__ import annotations

import signal

import pytest

from support import fresh_process

pytestmark = pytest.mark.usefixtures("fresh_processes")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('why')", 1, "why"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_how_it_ends(code: str, status: int, said: str) -> None:
    done = fresh_process.run(code)
    assert done.returncode == status
    assert said in done.stderr


def test_runs_leave_nothing_to_the_next() -> None:
    assert fresh_process.run("import sluice, sys; sluice.mine = sys.mine = 1").returncode == 0
    done = fresh_process.run("import sluice, sys; print(hasattr(sluice, 'mine'), hasattr(sys, 'mine'), __name__)")
    assert done.stdout == "False False __main__\n"
