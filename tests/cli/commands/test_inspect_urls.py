"""Commands take URLs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from support.command_line import run_command
from support.memory_files import filesystem, put

__all__ = ["filesystem"]


@pytest.mark.parametrize("command", ["inspect", "verify", "plan", "diff", "convert"])
def test_commands_take_urls(filesystem: Any, tmp_path: Path, command: str) -> None:
    sluice.save({"w": torch.zeros(3, 4)}, tmp_path / "f.safetensors")
    url = put(filesystem, tmp_path / "f.safetensors", "/d/f.safetensors")
    more = {"diff": [str(tmp_path / "f.safetensors")], "convert": [str(tmp_path / "f.pth")]}
    result = run_command(command, url, *more.get(command, []))
    assert result.exit_code == 0, result.output
    assert "memory://d/f.safetensors" in result.output
