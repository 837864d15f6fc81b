"""``sluice merge``: inputs with and without weights, configurations, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import sluice
from sluice.cli import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["merge", *map(str, arguments)])


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a.pth", tmp_path / "b.pth"]
    for value, path in enumerate(found):
        torch.save({"w": torch.full((4, 4), float(value))}, path)
    return found


def test_inputs(paths: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.pth"
    done = run(f"{paths[0]}=1", f"{paths[1]}=3", out, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tensors"] == 1
    assert torch.load(out)["w"][0, 0] == 0.75
    assert run(*paths, out).exit_code == 1  # it exists
    assert run(*paths, out, "--force").exit_code == 0
    assert torch.load(out)["w"][0, 0] == 0.5
    done = run(f"{paths[1]}=1", out, "--force", "--method", "task_arithmetic", "--base", paths[0], "-p", "lambda=0.25")
    assert done.exit_code == 0, done.output
    assert torch.load(out)["w"][0, 0] == 0.25
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"merge_method": "passthrough", "models": [{"model": str(paths[1])}]}))
    assert run(config, out, "--force").exit_code == 0
    assert torch.load(out)["w"][0, 0] == 1


def test_refused(paths: list[Path], tmp_path: Path) -> None:
    assert run(f"{paths[0]}=1", paths[1], tmp_path / "out.pth").exit_code == 2
    assert run(f"{paths[0]}=much", tmp_path / "out.pth").exit_code == 2
    assert run(*paths, tmp_path / "out.xyz").exit_code == 2
    assert run(tmp_path / "c.yml", tmp_path / "out.pth", "--method", "ties").exit_code == 2
    done = run(*paths, tmp_path / "out.pth", "--method", "ties")
    assert done.exit_code == 1
    assert "needs a base_model" in done.stderr


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def merge(config: Any, *_: object, **__: object) -> None:
        seen.append(config)
        raise sluice.FormatError("seen")

    monkeypatch.setattr(sluice, "merge", merge)
    signed = ["https://h/a.pth?X-Amz-Expires=3600&X-Amz-Signature=SECRET", "https://h/b.pth?Expires=3600"]
    assert run(*signed, "out.pth").exit_code == 1
    assert run(*(f"{url}=0.5" for url in signed), "out.pth").exit_code == 1
    assert run(*(f"{url}=1" for url in signed), "out.pth", "--header", "A:b").exit_code == 1
    assert seen[0] == signed
    assert seen[1] == dict.fromkeys(signed, 0.5)
    assert [(source.url, source.headers) for source in seen[2]] == [(url, {"A": "b"}) for url in signed]
    done = run("https://h/a.pth?sig=SECRET", "https://h/b.pth?sig=x=0.5", "out.pth")
    assert done.exit_code == 2
    assert "SECRET" not in done.output
