"""convert, verify and diff at a terminal and in scripts: bars, JSON, exit codes and help."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import sluice
from sluice.cli import main

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


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[io.StringIO, io.StringIO]]:
    """Return a function that sets stdin and stderr, runs a command and returns stdout and stderr."""

    def replace(stdin: io.StringIO | None, stderr: io.StringIO | None) -> tuple[io.StringIO, io.StringIO]:
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", stderr)
        return out, stderr or io.StringIO()

    return replace


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("quiet", [False, True])
def test_a_bar_at_a_terminal_and_json_all_the_same(
    files: dict[str, list[str]], streams: Callable[..., tuple[io.StringIO, io.StringIO]], command: str, quiet: bool
) -> None:
    out, err = streams(Pipe(), Terminal())
    more = ["--quiet"] if quiet else ["--json"]
    main([command, *files[command], *more], standalone_mode=False)
    if quiet:
        assert (out.getvalue(), err.getvalue()) == ("", "")
    else:
        assert "KiB" in err.getvalue()
        assert isinstance(json.loads(out.getvalue()), dict)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("stderr", [io.StringIO, lambda: None], ids=["a file", "closed"])
def test_no_bar_in_a_script(
    files: dict[str, list[str]],
    streams: Callable[..., tuple[io.StringIO, io.StringIO]],
    command: str,
    stderr: Callable[[], io.StringIO | None],
) -> None:
    out, err = streams(None, stderr())
    main([command, *files[command]], standalone_mode=False)
    assert out.getvalue()
    assert err.getvalue() == ""


def test_a_manifest_never_takes_the_place_of_its_checkpoint(files: dict[str, list[str]]) -> None:
    (source,) = files["verify"]
    before = Path(source).read_bytes()
    done = CliRunner().invoke(main, ["verify", source, "--write-manifest", source, "--force"])
    assert done.exit_code == 2
    assert "a different path" in done.stderr
    assert Path(source).read_bytes() == before


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_teaches(files: dict[str, list[str]], command: str) -> None:
    text = CliRunner().invoke(main, [command, "--help"]).stdout
    examples, _, rest = text.partition("Examples:")[2].partition("Exit codes:")
    assert examples.count(f"sluice {command} ") >= 3
    codes = {int(found) for found in re.findall(r"^ +(\d+)  +\w", rest, re.MULTILINE)}
    assert codes >= {0, 1, 2, 130}
    found = json.loads(CliRunner().invoke(main, [command, *files[command], "--json"]).stdout)
    said = rest.partition("The JSON object:")[2]
    assert [key for key in found if not re.search(rf"\b{key}\b", said)] == []
