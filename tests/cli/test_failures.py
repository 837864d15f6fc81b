"""Failures of the command line: one paragraph on stderr and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sluice
from support.command_line import run_command, state_dict


def _not_a_checkpoint() -> None:
    Path("file").write_text("hello, I am a text file")


def _empty() -> None:
    Path("file").touch()


def _folder() -> None:
    Path("file").mkdir()


def _fifo() -> None:
    os.mkfifo("file")


def _truncated() -> None:
    torch.save(state_dict(), "file")
    os.truncate("file", Path("file").stat().st_size // 2)


def _missing() -> None:
    pass


@pytest.mark.parametrize("make", [_not_a_checkpoint, _empty, _folder, _fifo, _truncated, _missing])
def test_a_bad_file_is_one_paragraph(directory: Path, make: Callable[[], None]) -> None:
    make()
    for arguments in (["inspect", "file"], ["load", "file", "--model", "cli_model:Net"]):
        result = run_command(*arguments)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith("Error: file")
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_dependency", "needs the module 'no_such_dependency', which is not installed"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_a_module_that_fails_is_the_models_fault(directory: Path, source: str, message: str) -> None:
    Path("cli_broken.py").write_text(f"{source}\nNet = None")
    result = run_command("load", "net.pth", "--model", "cli_broken:Net")
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_factory_that_fails_is_the_models_fault(directory: Path) -> None:
    result = run_command("load", "net.pth", "--model", "cli_model:broken")
    assert result.exit_code == 1
    assert "cli_model:broken raised RuntimeError: no such weights; --model-args passes arguments to it" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in run_command("--debug", "load", "net.pth", "--model", "cli_model:broken").stderr


def test_a_load_over_the_limits_is_exit_code_3(directory: Path) -> None:
    torch.save(state_dict(), "net.pth")
    result = run_command("load", "net.pth", "--model", "cli_model:Net", "--memory", "1KiB")
    assert result.exit_code == 3
    assert "1.00 KiB" in result.stderr


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (sluice.BudgetError("too big"), 3, "too big"),
        (sluice.FormatError("odd\x1b[2Jbytes"), 1, "odd\\x1b[2Jbytes"),
        (ValueError("surprise"), 1, "unexpected ValueError: surprise. This is a defect of sluice"),
        (MemoryError(), 1, "unexpected MemoryError. This"),
    ],
)
def test_every_exception_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int, message: str
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(sluice, "open", fail)
    result = run_command("inspect", "x")
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    debug = run_command("--debug", "inspect", "x")
    assert debug.exit_code == exit_code
    assert "Traceback" in debug.stderr


def test_a_closed_pipe_prints_no_error_message(directory: Path) -> None:
    torch.save({f"layer.{number}": torch.ones(1) for number in range(5000)}, "many.pth")
    command = f"{sys.executable} -c 'from sluice.cli import main; main()' inspect many.pth --all | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "many.pth\n"
    assert done.stderr == ""


def test_a_terminal_without_unicode_gets_escapes(directory: Path) -> None:
    torch.save({"größe": torch.ones(1)}, "net.pth")
    code = "import sys; from sluice.cli import main; main(sys.argv[1:])"
    for option in ([], ["--all"], ["--tree"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "inspect", "net.pth", *option],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert "gr\\xf6\\xdfe" in done.stdout


def test_version_and_help() -> None:
    assert run_command("--version").stdout == f"sluice {sluice.__version__}\n"
    text = run_command("--help").stdout
    for code in ("0 ", "1 ", "2 ", "3 ", "130"):
        assert f"  {code}" in text
    assert "Examples:" in run_command("inspect", "--help").stdout
    assert "Examples:" in run_command("load", "--help").stdout


def test_a_misspelt_command_is_proposed() -> None:
    result = run_command("inspct", "net.pth")
    assert result.exit_code == 2
    assert "No such command 'inspct'. Did you mean 'inspect'?" in result.stderr
    assert "sluice verify URL --cache DIRECTORY" in run_command("prefetch", "s3://bucket/m").stderr
