"""``--encoding``: every command that reads a checkpoint passes it on."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from support import old_files
from support.command_line import run_command

#: A file of Python 2 whose names and text are in latin1.
FILE = str(Path(old_files.__path__[0]) / "torch-1.0.0-latin-1.pth")


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", FILE],
        ["verify", FILE],
        ["diff", FILE, FILE],
        ["convert", FILE, "new.safetensors", "--key", "café"],
        ["plan", FILE],
        ["load", FILE, "--model", "accented:Net"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_reads_text_in_an_encoding(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "import torch\n\n\ndef Net():\n    leaf = torch.nn.LayerNorm(2, bias=False)\n"
    source += "    return torch.nn.ModuleDict({'café': leaf})\n"
    Path("accented.py").write_text(source, encoding="utf-8")
    refused = run_command(*command)
    assert refused.exit_code != 0
    assert "--encoding" in refused.output or "encoding='latin1'" in refused.output
    found = run_command(*command, "--encoding", "latin1")
    assert found.exit_code == 0, found.output
    if command[0] == "convert":
        assert torch.equal(safetensors.torch.load_file("new.safetensors")["weight"], torch.ones(2))


def test_an_unknown_encoding_is_a_usage_error() -> None:
    result = run_command("inspect", FILE, "--encoding", "utf-99")
    assert result.exit_code == 2
    assert "'utf-99' is not an encoding of text" in result.output
