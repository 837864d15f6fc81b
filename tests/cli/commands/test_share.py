"""``sluice share``: build, find, hold, list and drop copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from support.command_line import run_command


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SLUICE_SHARED_DIR", str(tmp_path / "store"))
    sluice.save({"w": torch.arange(1000.0)}, tmp_path / "m.safetensors")
    return str(tmp_path / "m.safetensors")


def test_a_copy_is_built_found_listed_and_dropped(path: str) -> None:
    key, *_ = run_command("share", path, "--dtype", "bf16").output.split()
    assert f"{key} found, 2.0" in run_command("share", path, "--dtype", "bf16").output
    with sluice.shared(path, dtype="bf16") as copy:
        assert (copy.key, copy.built) == (key, False)
        assert "in use" in run_command("share", "--list").output
        refused = run_command("share", "--drop", key)
        assert (refused.exit_code, "is in use" in refused.output) == (1, True)
    assert "unused for 0 s" in run_command("share", "--list").output
    assert run_command("share", "--drop", key).exit_code == 0
    assert run_command("share", "--list").output == ""
    assert run_command("share", "--drop", key).exit_code == 1


def test_keep_holds_and_then_drops(path: str, tmp_path: Path) -> None:
    done = run_command("share", path, "--keep", "0s")
    assert (done.exit_code, list((tmp_path / "store").iterdir())) == (0, [])


@pytest.mark.parametrize("arguments", [(), ("--list", "--drop", "x"), ("m.pth", "--keep", "soon")])
def test_wrong_command_lines(arguments: tuple[str, ...]) -> None:
    assert run_command("share", *arguments).exit_code == 2
