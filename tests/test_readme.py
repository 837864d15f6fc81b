"""The README's examples work when pasted, in the order in which they stand."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice.cli import main

_README = Path(__file__).parent.parent / "README.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", _README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_work_when_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    module, *scripts = _blocks("python")
    Path("net.py").write_text(module)
    for script in scripts:
        exec(compile(script, "README.md", "exec"), {"__name__": "__main__"})
    output = capsys.readouterr().out
    for part in ("4 tensors, 16.0 MiB on cpu", "cast: float32->bfloat16 (4)", "torch.Size([1, 1024])", "'up.weight'"):
        assert part in output

    commands = [line for block in _blocks("bash") for line in block.splitlines() if line.startswith("sluice ")]
    assert len(commands) >= 5
    for line in commands:
        result = CliRunner().invoke(main, shlex.split(line, comments=True)[1:])
        assert result.exit_code == 0, f"{line}: {result.stderr}"
    monkeypatch.delitem(sys.modules, "net")
