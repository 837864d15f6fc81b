"""Fresh processes behave as separate interpreters, and do not affect the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import fresh_process

pytestmark = pytest.mark.usefixtures("fresh_processes")


def test_it_is_what_an_interpreter_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLUICE_ODD", "1")
    code = "import os, sys; print(sys.argv, __name__, os.getcwd(), os.environ['SLUICE_ODD'], file=sys.stderr)"
    done = fresh_process.run(code, "a b", 3)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"{['-c', 'a b', '3']} __main__ {tmp_path} 1\n"


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="stacks come from the server")
def test_one_that_hangs_is_killed_and_shows_its_stacks() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as late:
        fresh_process.run("def hangs():\n    import time; time.sleep(100)\nhangs()", timeout=0.3)
    assert "in hangs" in late.value.__notes__[0]
    assert fresh_process.run("print(1)").stdout == "1\n"


def test_pipes_of_a_running_process() -> None:
    code = "import sys; print(sys.argv[1], flush=True); print(sys.stdin.readline().upper(), end=''); sys.exit(3)"
    started = fresh_process.SUBPROCESS.Popen(
        [sys.executable, "-c", code, "ready"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with started as process:
        assert process.stdout.readline() == "ready\n"
        assert fresh_process.run("print(2)").stdout == "2\n"  # concurrently
        os.write(process.stdin.fileno(), b"word\n")
        assert process.stdout.readline() == "WORD\n"
    assert process.returncode == 3
