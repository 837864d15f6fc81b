"""Output of commands: failures, and reports on terminals and in scripts."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
import torch

import sluice
from sluice.cli import main
from sluice.cli.output import print_sections
from sluice.reports.document import Grid, Strong
from support.command_line import refused, run_command


def _truncated(path: str) -> None:
    os.truncate(shutil.copy("net.pth", path), os.path.getsize("net.pth") // 2)


BAD_FILES: dict[str, Callable[[str], object]] = {
    "a text": lambda path: Path(path).write_text("hello, I am a text file"),
    "empty": lambda path: Path(path).touch(),
    "a folder": os.mkdir,
    "a FIFO": os.mkfifo,
    "truncated": _truncated,
    "missing": lambda _: None,
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_one_paragraph(directory: Path, kind: str) -> None:
    BAD_FILES[kind]("file")
    for arguments in (["inspect", "file"], ["load", "file", "--model", "cli_model:Net"]):
        assert re.fullmatch("Error: file.*\n", refused(*arguments, code=1))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_dependency", "needs the module 'no_such_dependency', which is not installed"),
        ("1 / 0", "raised ZeroDivisionError"),
        ("def Net(): 1 / 0", "Net raised ZeroDivisionError: division by zero; --model-args passes arguments to it"),
    ],
)
def test_a_module_or_factory_that_fails_is_the_models_fault(
    directory: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.delitem(sys.modules, "cli_broken", raising=False)
    Path("cli_broken.py").write_text(source)
    command = ("load", "net.pth", "--model", "cli_broken:Net")
    assert message in refused(*command, code=1)
    refused("--debug", *command, code=1)


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (sluice.BudgetError("too big"), 3, "too big"),
        (sluice.FormatError("odd\x1b[2Jbytes"), 1, "odd\\x1b[2Jbytes"),
        (ValueError("surprise"), 1, "unexpected ValueError: surprise. This is a defect of sluice"),
        (MemoryError(), 1, "unexpected MemoryError. This"),
        (OSError("libxxhash.so.0: cannot open"), 1, "unexpected OSError: libxxhash.so.0: cannot open. This"),
    ],
)
def test_every_exception_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int, message: str
) -> None:
    monkeypatch.setattr(sluice, "open", Mock(side_effect=error))
    assert message in refused("inspect", "x", code=exit_code)
    refused("--debug", "inspect", "x", code=exit_code)


def test_a_closed_pipe_prints_no_error_message(directory: Path) -> None:
    torch.save({f"layer.{number}": torch.ones(1) for number in range(5000)}, "many.pth")
    command = f"{sys.executable} -c 'from sluice.cli import main; main()' inspect many.pth --all | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "many.pth\n"
    assert done.stderr == ""


class Unwritable(io.StringIO):
    """An output whose buffer cannot be written."""

    error: OSError = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        if not self.closed:
            raise self.error


@pytest.mark.parametrize("error", [Unwritable.error, BrokenPipeError(errno.EPIPE, "")])
@pytest.mark.parametrize(("command", "code"), [("--help", 1), ("inspect", 1), ("verify", 2), ("diff", 2)])
def test_output_that_cannot_be_written_is_no_answer(
    files: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, error: OSError, command: str, code: int
) -> None:
    out, err = Unwritable(), io.StringIO()
    out.error = error
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(SystemExit) as ended:
        main([command, *files.get(command, files["verify"])])
    assert (ended.value.code, out.closed) == (code, True)
    assert err.getvalue() == ("Error: cannot write the output: No space left on device\n" if error.strerror else "")


def test_a_command_with_a_closed_output_does_its_work(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    main(["inspect", "net.pth", "--tree"], standalone_mode=False)
    sys.stdout.close()


def test_a_terminal_without_unicode_gets_escapes(directory: Path) -> None:
    torch.save({"größe": torch.ones(1)}, "net.pth")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for option in ([], ["--all"], ["--tree"]):
        command = [sys.executable, "-m", "sluice", "inspect", "net.pth", *option]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert "gr\\xf6\\xdfe" in done.stdout


def test_version_help_and_misspelt_commands() -> None:
    assert run_command("--version").stdout == f"sluice {sluice.__version__}\n"
    text = run_command("--help").stdout
    for code in ("0 ", "1 ", "2 ", "3 ", "130"):
        assert f"  {code}" in text
    assert "Examples:" in run_command("inspect", "--help").stdout
    assert "Examples:" in run_command("load", "--help").stdout
    assert "No such command 'inspct'. Did you mean 'inspect'?" in refused("inspct", "net.pth")
    assert "sluice verify URL --cache DIRECTORY" in run_command("prefetch", "s3://bucket/m").stderr


COMMANDS = ["convert", "verify", "diff"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Pipe(io.StringIO):
    """An input that is not a terminal and never ends: a prompt would block."""

    def read(self, _size: int | None = -1, /) -> str:
        raise AssertionError("waits for an answer")

    readline = read  # type: ignore[assignment]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, list[str]]:
    """Return the arguments of each command."""
    source, other, out = (str(tmp_path / name) for name in ("f.pt", "g.safetensors", "h.pt"))
    state = {"w": torch.ones(50, 50), "b": torch.ones(3)}
    sluice.save(state, source)
    sluice.save(state, other)
    return {"convert": [source, out], "verify": [source], "diff": [source, other]}


def run_with(
    patch: pytest.MonkeyPatch, stdin: io.StringIO | None, stderr: io.StringIO | None, *command: str
) -> tuple[str, str]:
    """Run a command with these streams; return what it writes to stdout and stderr."""
    out = io.StringIO()
    for name, stream in (("stdin", stdin), ("stdout", out), ("stderr", stderr)):
        patch.setattr(sys, name, stream)
    main(list(command), standalone_mode=False)
    return out.getvalue(), stderr.getvalue() if stderr else ""


@pytest.mark.parametrize("command", COMMANDS)
def test_bars_are_for_terminals_only(
    files: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    words = (command, *files[command], *(["--force"] if command == "convert" else []))
    assert run_with(monkeypatch, Pipe(), Terminal(), *words, "--quiet") == ("", "")
    out, err = run_with(monkeypatch, Pipe(), Terminal(), *words, "--json")
    assert "KiB" in err
    assert isinstance(json.loads(out), dict)
    for stderr in (io.StringIO(), None):  # a file, and closed
        out, err = run_with(monkeypatch, None, stderr, *words)
        assert (bool(out), err) == (True, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_teaches(files: dict[str, list[str]], command: str) -> None:
    text = run_command(command, "--help").stdout
    examples, _, rest = text.partition("Examples:")[2].partition("Exit codes:")
    assert examples.count(f"sluice {command} ") >= 3
    codes = {int(found) for found in re.findall(r"^ +(\d+)  +\w", rest, re.MULTILINE)}
    assert codes >= {0, 1, 2, 130}
    found = json.loads(run_command(command, *files[command], "--json").stdout)
    said = rest.partition("The JSON object:")[2]
    assert [key for key in found if not re.search(rf"\b{key}\b", said)] == []


_NAME = "transformer.encoder.layers.11.self_attention.w"

_COMMANDS = [
    ("diff", "a.pth", "b.pth"),
    ("plan", "a.pth"),
    ("plan", "net.pth", "--model", "cli_model:Net"),
    ("inspect", "a.pth"),
    ("inspect", "a.pth", "--all"),
    ("verify", "broken.pth"),
    ("load", "net.pth", "--model", "cli_model:Net", "--table"),
]


@pytest.fixture
def reported_files(directory: object) -> None:
    a = {_NAME: torch.ones(300, 400), "head.weight": torch.ones(3), "long": torch.ones(1)}
    torch.save({"state_dict": a, "hyper_parameters_of_the_run": {}}, "a.pth")
    torch.save(
        {f"{_NAME}s": torch.ones(300, 400), "head.weight": torch.zeros(3).half(), "long": torch.ones(2)}, "b.pth"
    )
    with open("a.pth", "rb") as intact, open("broken.pth", "wb") as broken:
        broken.write(intact.read().replace(torch.ones(64).numpy().tobytes(), bytes(256), 1))


@pytest.mark.parametrize("columns", [30, 40, 60, 80])
@pytest.mark.parametrize("command", _COMMANDS, ids=" ".join)
def test_reports_fit_the_terminal(
    reported_files: None, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], columns: int
) -> None:
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", screen)
    try:
        main(list(command), standalone_mode=False)
    except click.exceptions.Exit:
        assert command[0] in {"diff", "verify"}
    shown = click.unstyle(screen.getvalue())
    assert max(map(len, shown.splitlines())) <= columns
    if columns < 60 and command[0] in {"diff", "inspect"}:
        assert "head.weight" in shown


def test_titles_headers_and_the_chosen_row_stand_out_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for screen in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", screen)
        print_sections([Strong("title"), Grid(("method", ">bytes"), [["a", "1"], ["b", "漢字"]], strong=1), "note"])
        lines = screen.getvalue().splitlines()
        words = [click.unstyle(line).split() for line in lines if any(map(str.isalnum, line))]
        assert words == [["title"], ["method", "bytes"], ["a", "1"], ["b", "漢字"], ["note"]]
        bold = [click.unstyle(line).split()[0] for line in lines if "\x1b[1m" in line]
        assert bold == (["title", "method", "b"] if screen.isatty() else [])
