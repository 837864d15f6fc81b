"""The two commands: what they choose, what they leave behind, when they fail."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from bench import demo, load
from bench.demo import choose_size
from sluice.benchmark._folder import temporary_folder
from sluice.benchmark._records import Outcome, Run, Scenario, Verdict

_FINALS = {"small": 1 << 30, "medium": 2 << 30, "large": 4 << 30}
_TRUTH = Verdict(weights="abc", logits=(1.0,))


def _choose(**changes: Any) -> str:
    plenty = {"memory_bytes": 1 << 40, "disk_bytes": 1 << 40, "device_bytes": None, "seconds_per_process": 0.0}
    plenty["seconds_per_byte"] = 0.0
    return choose_size(_FINALS, **{**plenty, **changes})


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, "large"),
        ({"memory_bytes": 8 << 30}, "medium"),
        ({"disk_bytes": 3 << 30}, "small"),
        ({"device_bytes": 5 << 30}, "medium"),
        ({"seconds_per_byte": 3e-9}, "medium"),
        ({"seconds_per_process": 3.0, "seconds_per_byte": 3e-9}, "small"),
        ({"memory_bytes": 0}, "small"),
    ],
)
def test_the_size_is_the_largest_that_everything_allows(changes: dict[str, Any], size: str) -> None:
    assert _choose(**changes) == size


class FakeRunner:
    """Stands for the runner: remembers the scenarios and answers with a good run for each method and state."""

    def __init__(self, found: Verdict = _TRUTH) -> None:
        self.scenarios: Sequence[Scenario] = ()
        self.files: set[str] = set()
        self._found = found

    def __call__(self, _console: Console, scenarios: Sequence[Scenario], *, repetitions: int) -> list[Run]:
        assert repetitions == 1
        self.scenarios = scenarios
        self.files = {path.name for scenario in scenarios for path in scenario.checkpoints.values() if path.exists()}
        return [run for scenario in scenarios for run in self._runs(scenario)]

    def _runs(self, scenario: Scenario) -> list[Run]:
        methods = {"reference": _TRUTH} | dict.fromkeys(scenario.checkpoints, self._found)
        return [
            Run(
                scenario=scenario.title,
                method=method,
                state=state,
                repetition=0,
                outcome=Outcome(status="ok", seconds=1.0, total_bytes=scenario.final_bytes, verdict=verdict),
            )
            for method, verdict in methods.items()
            for state in scenario.states
        ]


def _invoke(command: click.Command, *arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], env=env)


def _demo(
    monkeypatch: pytest.MonkeyPatch,
    runner: FakeRunner,
    tmp_path: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
) -> Result:
    monkeypatch.setattr(demo, "run_with_progress", runner)
    (tmp_path / "disk").mkdir()
    return _invoke(demo.main, "--directory", tmp_path / "disk", "--out", tmp_path / "out", *arguments, env=env)


def test_the_demo_runs_all_strategies_twice_and_cleans_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = FakeRunner()
    result = _demo(monkeypatch, runner, tmp_path, env={"SIZE": "tiny"})
    assert result.exit_code == 0, result.output
    assert [scenario.dtype for scenario in runner.scenarios] == ["float32", "bfloat16"]
    assert all(len(scenario.checkpoints) == 6 for scenario in runner.scenarios)
    assert runner.files == {"model.pth", "parameters"}
    assert list((tmp_path / "disk").iterdir()) == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "results.md"}
    assert "float32: sluice peaked at 1.00 F, the others at 1.00 to 1.00 F." in result.output


def _terminate_inside(parent: Path) -> None:
    with temporary_folder(parent) as folder:
        (folder / "large").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)


def test_the_folder_goes_when_its_process_is_terminated(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        _terminate_inside(tmp_path)
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []


def test_the_demo_keeps_its_checkpoints_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = _demo(monkeypatch, FakeRunner(), tmp_path, "--size", "tiny", "--keep")
    (kept,) = (tmp_path / "disk").iterdir()
    assert (kept / "model.pth").exists()
    assert f"the checkpoints are in {kept}" in result.output


def test_the_demo_chooses_a_size_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []
    monkeypatch.setattr("sluice.benchmark._machine.free_memory_bytes", lambda: 0)
    monkeypatch.setattr(demo, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(demo, "make_checkpoint", lambda _path, size, _dtype, kind: made.append(f"{size} {kind}"))
    result = _demo(monkeypatch, FakeRunner(), tmp_path)
    assert result.exit_code == 0, result.output
    assert made == ["small torch", "small per-parameter"]


def test_wrong_logits_fail_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = _demo(monkeypatch, FakeRunner(Verdict(weights="abd", logits=(1.0,))), tmp_path, "--size", "tiny")
    assert result.exit_code == 1
    assert "wrong weights or logits: naive" in result.output


def test_load_runs_what_was_selected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = FakeRunner()
    monkeypatch.setattr(load, "run_with_progress", runner)
    arguments: list[str] = ["--size", "tiny", "--runs", "1", "--case", "pth-bf16", "--case", "in-a-row-safetensors"]
    arguments += ["--method", "torch-load", "--method", "raw-direct"]
    folders: list[str | Path] = ["--directory", tmp_path / "files", "--out", tmp_path / "out"]
    result = _invoke(load.main, *arguments, *folders)
    assert result.exit_code == 0, result.output
    assert [(s.dtype, s.states, list(s.checkpoints)) for s in runner.scenarios] == [
        ("bfloat16", ("cold", "warm"), ["raw-direct", "torch-load"]),
        ("float32", ("first", "second", "third"), ["raw-direct"]),
    ]
    assert runner.files == {"tiny.pth", "tiny.safetensors"}
    document = json.loads((tmp_path / "out/load.json").read_text())
    assert document["command"] == " ".join(["python -m bench.load", *arguments])

    before = (tmp_path / "files/tiny.pth").stat().st_mtime_ns
    _invoke(load.main, *arguments, *folders)
    assert (tmp_path / "files/tiny.pth").stat().st_mtime_ns == before  # used, not made again


def test_load_says_which_peers_are_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "run_with_progress", FakeRunner())
    monkeypatch.setattr(load, "_PACKAGES", ("torch", "no-such-loader"))
    arguments = ["--size", "tiny", "--runs", "1", "--case", "pth-fp32", "--directory", str(tmp_path)]
    _invoke(load.main, *arguments, "--out", tmp_path / "out")
    assert "no-such-loader absent" in (tmp_path / "out/load.md").read_text()
