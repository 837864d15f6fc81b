"""Ctrl-C at any moment of the command line: exit code 130, one line, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

#: A module that says when it is being imported, and waits there.
_WAITS = """
import sys, time
print("importing", flush=True)
time.sleep(100)
"""

#: The same, but with an import that fails after an interrupt, as those of numpy and torch may.
_WAITS_AND_REPLACES = """
import sys, time
print("importing", flush=True)
try:
    time.sleep(100)
except KeyboardInterrupt:
    raise ImportError("cannot load module more than once per process") from None
"""


def interrupted(folder: Path, *arguments: str, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the command, interrupt it when it prints its first line, and return the result."""
    # A job in the background inherits ignored interrupts.
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"] if ignored else ["env", "--default-signal=INT"]
    process = subprocess.Popen(
        [*ignoring, sys.executable, "-m", "sluice", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        if ignored:
            process.terminate()
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize(
    ("module", "source", "arguments"),
    [
        ("click.py", _WAITS, ("inspect", "x.pth")),  # while the command line is imported
        ("net.py", _WAITS, ("load", "x.pth", "--model", "net:Net")),  # while a command imports
        ("net.py", _WAITS_AND_REPLACES, ("load", "x.pth", "--model", "net:Net")),
    ],
)
def test_during_imports(tmp_path: Path, module: str, source: str, arguments: tuple[str, ...]) -> None:
    (tmp_path / module).write_text(f"{source}\nNet = None")
    done = interrupted(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (130, "Error: interrupted\n")


def test_after_the_command(tmp_path: Path) -> None:
    """Python's own end: handlers of ``atexit`` run after the command has returned."""
    code = "import atexit, time\natexit.register(lambda: (print('importing', flush=True), time.sleep(100)))\nNet = 1"
    (tmp_path / "net.py").write_text(code)
    done = interrupted(tmp_path, "load", "x.pth", "--model", "net:Net")
    assert done.returncode == 130
    assert done.stderr.endswith("Error: interrupted\n")
    assert "Traceback" not in done.stderr


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """As in a background job of a shell."""
    (tmp_path / "click.py").write_text(_WAITS)
    assert interrupted(tmp_path, "inspect", "x.pth", ignored=True).returncode == -signal.SIGTERM
