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


@pytest.mark.parametrize(("size", "problem"), [("1GiB", "--cache-bytes needs --cache"), ("much", "not a size")])
def test_the_size_of_a_cache_is_one_and_needs_a_directory(size: str, problem: str) -> None:
    result = CliRunner().invoke(main, ["verify", "https://host/m", "--cache-bytes", size])
    assert result.exit_code == 2
    assert problem in result.output


@pytest.mark.parametrize("command", ["inspect", "verify", "plan", "diff", "convert"])
def test_commands_read_what_was_cached(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, local = save({"w": torch.arange(100_000.0)}), str(tmp_path / "m.safetensors")
    Path(local).write_bytes(content)
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    more = {"diff": [local], "convert": [str(tmp_path / "f.pth")]}
    with RangeServer({"/m.safetensors": content}) as server:
        url = server.url("/m.safetensors")
        assert CliRunner().invoke(main, ["verify", url]).exit_code == 0
        server.requests.clear()
        done = CliRunner().invoke(main, [command, url, *more.get(command, [])])
        assert done.exit_code == 0, done.output
        assert len(server.requests) == 1
        if command == "diff":
            assert CliRunner().invoke(main, [command, local, url]).exit_code == 0
            assert len(server.requests) == 2
