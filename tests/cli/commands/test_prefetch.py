"""``sluice prefetch`` and ``--cache``: output, exit codes, and the directory that commands share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")

import sluice
from support.command_line import run_command
from support.range_server import RangeServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    sluice.save({"w": torch.arange(100_000.0)}, tmp_path / "m.safetensors")
    with RangeServer({"/m.safetensors": (tmp_path / "m.safetensors").read_bytes()}) as running:
        yield running


def test_a_table_or_json_with_every_file(server: RangeServer, tmp_path: Path) -> None:
    url, cache = server.url("/m.safetensors"), str(tmp_path / "cache")
    done = run_command("prefetch", url, "--cache", cache)
    assert done.exit_code == 0, done.output
    assert f"1 of 1 file of {url} are in the cache" in done.output
    found = json.loads(run_command("prefetch", url, "--cache", cache, "--json").stdout)
    assert found["complete"] is True
    assert found["files"] == [
        {"path": url, "nbytes": len(server.files["/m.safetensors"]), "requested_bytes": 65536, "requests": 1}
        | {"problem": None}
    ]
    assert run_command("prefetch", url, "--cache", cache, "--quiet").output == ""


def test_1_if_the_files_cannot_be_cached(server: RangeServer, tmp_path: Path) -> None:
    url, cache = server.url("/m.safetensors"), str(tmp_path / "cache")
    done = run_command("prefetch", url, "--cache", cache, "--cache-bytes", "100KiB")
    assert done.exit_code == 1
    assert "leaves no room" in done.output
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache").chmod(0o777)
    done = run_command("prefetch", url, "--cache", cache)
    assert done.exit_code == 1
    assert "other users" in done.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["https://host/m"], "the directory is missing"),
        (["https://host/m", "--cache-bytes", "1GiB"], "--cache-bytes needs --cache"),
        (["https://host/m", "--cache", "c", "--cache-bytes", "much"], "not a size"),
        (["m.pth", "--cache", "c"], "local files need no cache"),
    ],
)
def test_2_if_the_command_line_is_wrong(arguments: list[str], problem: str) -> None:
    done = run_command("prefetch", *arguments)
    assert done.exit_code == 2
    assert problem in done.output


@pytest.mark.parametrize("command", ["inspect", "verify", "plan", "diff", "convert"])
def test_commands_read_what_was_prefetched(
    server: RangeServer, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, local = server.url("/m.safetensors"), str(tmp_path / "m.safetensors")
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    assert run_command("prefetch", url).exit_code == 0
    server.requests.clear()
    more = {"diff": [local], "convert": [str(tmp_path / "f.pth")]}
    done = run_command(command, url, *more.get(command, []))
    assert done.exit_code == 0, done.output
    assert len(server.requests) == 1
    if command == "diff":
        assert run_command(command, local, url).exit_code == 0
        assert len(server.requests) == 2
