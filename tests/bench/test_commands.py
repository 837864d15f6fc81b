"""The commands of bench/: the loads that they run and the files that they leave."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from bench import load
from sluice.benchmark.machine import temporary_folder
from support.comparisons import FakeRunner


def _invoke(command: click.Command, *arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def _terminate_inside(parent: Path) -> None:
    with temporary_folder(parent) as folder:
        (folder / "large").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)


def test_the_folder_is_removed_when_its_process_is_terminated(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        _terminate_inside(tmp_path / "new")
    assert ended.value.code == 143
    assert list((tmp_path / "new").iterdir()) == []


def test_load_runs_what_was_selected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = FakeRunner()
    monkeypatch.setattr(load, "run_with_progress", runner)
    arguments: list[str] = ["--size", "tiny", "--runs", "1", "--case", "pth-bf16", "--case", "safetensors-fp32"]
    arguments += ["--method", "torch-load", "--method", "raw-direct", "--method", "sluice-map"]
    folders: list[str | Path] = ["--directory", tmp_path / "files", "--out", tmp_path / "out"]
    result = _invoke(load.main, *arguments, *folders)
    assert result.exit_code == 0, result.output
    assert [(s.dtype, s.states, list(s.checkpoints)) for s in runner.scenarios] == [
        ("bfloat16", ("cold", "warm"), ["raw-direct", "torch-load", "sluice-map"]),
        ("float32", ("cold", "warm"), ["raw-direct", "sluice-map"]),
    ]
    assert runner.files == {"tiny.pth", "tiny.safetensors"}
    document = json.loads((tmp_path / "out/load.json").read_text())
    assert document["command"] == " ".join(["python -m bench.load", *arguments])

    before = (tmp_path / "files/tiny.pth").stat().st_mtime_ns
    _invoke(load.main, *arguments, *folders)
    assert (tmp_path / "files/tiny.pth").stat().st_mtime_ns == before  # reused, not written again


def test_load_lists_absent_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "run_with_progress", FakeRunner())
    monkeypatch.setattr(load, "_PACKAGES", ("torch", "no-such-loader"))
    arguments = ["--size", "tiny", "--runs", "1", "--case", "pth-fp32", "--directory", str(tmp_path)]
    _invoke(load.main, *arguments, "--out", tmp_path / "out")
    assert "no-such-loader absent" in (tmp_path / "out/load.md").read_text()


@pytest.mark.parametrize(("balloons", "seconds"), [(("bind", "virtio0"), 3.0), (("bind",), 0.0), (None, 0.0)])
def test_only_a_machine_with_a_balloon_waits(
    balloons: tuple[str, ...] | None, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_BALLOONS", tmp_path / "virtio_balloon")
    for name in balloons or ():
        (tmp_path / "virtio_balloon" / name).mkdir(parents=True)
    assert load._settling_seconds() == seconds
