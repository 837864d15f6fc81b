"""Commands take URLs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from support import distributed
from support.command_line import run_command
from support.memory_files import filesystem, put
from support.range_server import RangeServer

__all__ = ["filesystem"]


@pytest.mark.parametrize("command", ["inspect", "verify", "plan", "diff", "convert"])
def test_commands_take_urls(filesystem: Any, tmp_path: Path, command: str) -> None:
    sluice.save({"w": torch.zeros(3, 4)}, tmp_path / "f.safetensors")
    url = put(filesystem, tmp_path / "f.safetensors", "/d/f.safetensors")
    more = {"diff": [str(tmp_path / "f.safetensors")], "convert": [str(tmp_path / "f.pth")]}
    result = run_command(command, url, *more.get(command, []))
    assert result.exit_code == 0, result.output
    assert "memory://d/f.safetensors" in result.output


def test_only_json_requests_the_headers_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    """They have the strides, which the metadata does not have."""
    pytest.importorskip("urllib3", reason="urllib3 is not installed: pip install 'sluice[remote]'")
    columns = torch.randn(400, 200).t()
    distributed.save(tmp_path, {"first": torch.zeros(100_000), "w": columns, "other": torch.zeros(100_000)})
    with RangeServer({f"/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}) as server:
        for options in ([], ["--tree"], ["--all"]):
            server.requests.clear()
            result = run_command("inspect", server.url("/.metadata"), *options)
            assert result.exit_code == 0, result.output
            assert "[200, 400]" in result.output
            assert len(server.requests) == 2
        result = run_command("inspect", server.url("/.metadata"), "--json")
        tensors = {each["name"]: each for each in json.loads(result.stdout)["tensors"]}
    assert tensors["w"]["stride"] == [1, 200]
