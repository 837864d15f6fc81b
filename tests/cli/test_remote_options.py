"""Options for URLs, of every command that reads a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save

from sluice.cli import main
from support.range_server import RangeServer

pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")


@pytest.mark.parametrize("command", ["inspect", "plan", "verify", "diff", "convert"])
def test_settings_reach_the_server(tmp_path: Path, command: str) -> None:
    content = save({"w": torch.ones(4)})
    with RangeServer({"/m.safetensors": content}) as server:
        local = tmp_path / "m.safetensors"
        local.write_bytes(content)
        more = {"diff": [str(local)], "convert": [str(tmp_path / "copy.safetensors")]}.get(command, [])
        options = [
            "--header",
            "X-Team: a",
            "--header",
            "Authorization:Bearer b",
            "--connections",
            "2",
            "--timeout",
            "9",
        ]
        result = CliRunner().invoke(main, [command, server.url("/m.safetensors"), *more, *options, "--verify", "no"])
        assert result.exit_code == 0, result.output
        assert {request.headers["X-Team"] for request in server.requests} == {"a"}
        assert {request.headers["Authorization"] for request in server.requests} == {"Bearer b"}


@pytest.mark.parametrize("option", [["--header", "secret"], ["--timeout", "0"], ["--connections", "0"]])
def test_wrong_values_are_refused(option: list[str]) -> None:
    result = CliRunner().invoke(main, ["inspect", "http://127.0.0.1:1/m", *option])
    assert result.exit_code == 2
    assert "secret" not in result.output
