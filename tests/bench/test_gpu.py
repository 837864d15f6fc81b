"""``bench.gpu`` without a GPU: its runs, its deadline and its output."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from bench import _gpu_runner, gpu
from bench import _puzzle as puzzle
from sluice.benchmark import child as _child
from sluice.benchmark import machine as _machine
from sluice.benchmark.methods import METHODS
from sluice.benchmark.records import MethodJob, Outcome, Scenario, State, Verdict

MIB = 1 << 20
GIB = 1 << 30


def test_every_method_is_known_and_reads_its_checkpoint() -> None:
    for scenario in gpu.scenarios_for("tiny", Path("folder")):
        assert scenario.device == "cuda"
        for method, path in scenario.checkpoints.items():
            assert path.suffix in METHODS[method].reads, (scenario.title, method)


def test_raw_limits_come_first_and_ours_is_in_every_table() -> None:
    scenarios = gpu.scenarios_for("tiny", Path("folder"))
    assert list(scenarios[0].checkpoints)[:2] == ["raw-direct", "raw-buffered"]
    assert len({scenario.title for scenario in scenarios}) == len(scenarios)
    assert all(any(method.startswith("sluice") for method in scenario.checkpoints) for scenario in scenarios)


def test_without_a_gpu_the_command_prints_an_error_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(gpu.main, ["--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.output == f"bench.gpu needs a CUDA device, and torch {torch.__version__} finds none here.\n"
    assert not (tmp_path / "out").exists()


def test_a_load_onto_a_device_ends_when_the_device_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(_child, "touch", lambda _: calls.append("touched"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("idle"))
    for device in ("cuda", "cpu"):
        _child._finish(torch.nn.Identity(), device)
    assert calls == ["idle", "touched"]


class FakeJobs:
    """Fake processes and page cache that record the requests to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seconds: float = 1.0) -> None:
        self.log: list[str] = []
        self.timeouts: list[float] = []
        self.clock = 0.0
        self._seconds = seconds
        monkeypatch.setattr(_gpu_runner, "run_job", self._run_job)
        for state in list(_gpu_runner._PREPARATIONS):
            monkeypatch.setitem(_gpu_runner._PREPARATIONS, state, bool)
        monkeypatch.setattr(_gpu_runner, "_seconds_left", lambda deadline: deadline - self.clock)
        monkeypatch.setattr(_gpu_runner, "absence", lambda method: "no kit" if method == "instanttensor" else "")

    def _run_job(self, job: MethodJob, *, timeout_seconds: float) -> Outcome:
        self.clock += self._seconds
        self.timeouts.append(timeout_seconds)
        self.log.append(f"{job.method} {job.dtype}{' verified' if job.verify else ''}")
        verdict = Verdict(weights=job.dtype, logits=(1.0,)) if job.verify else None
        final = 100 * MIB if job.dtype == "float32" else 50 * MIB
        return Outcome(
            status="ok", seconds=0.5, total_bytes=90 * MIB, device_reserved_bytes=final + MIB, verdict=verdict
        )


def watch(_scenario: Scenario, _method: str, _state: State, load: Any) -> Outcome:
    outcome: Outcome = load()
    return outcome


def test_the_truth_is_made_once_for_each_dtype_and_models_are_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs(monkeypatch)
    scenarios = gpu.scenarios_for("tiny", Path("folder"))[:3:2]
    runs = list(_gpu_runner.run_within(scenarios, deadline=1000.0, watch=watch))
    assert jobs.log == [
        "reference float32 verified",
        *(f"{method} float32 verified" for method in scenarios[0].checkpoints),
        *(f"{method} float32" for method in scenarios[0].checkpoints),
        "reference bfloat16 verified",
        *(f"{method} bfloat16 verified" for method in scenarios[1].checkpoints),
        *(f"{method} bfloat16" for method in scenarios[1].checkpoints),
    ]
    assert len(runs) == len(jobs.log)
    assert {run.scenario for run in runs if run.method == "reference"} == {scenario.title for scenario in scenarios}


def test_nothing_is_under_way_after_the_deadline_and_every_row_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs(monkeypatch, seconds=30.0)
    scenarios = gpu.scenarios_for("tiny", Path("folder"))
    runs = list(_gpu_runner.run_within(scenarios, deadline=100.0, watch=watch))
    assert jobs.timeouts == [100.0, 70.0, 40.0]  # with 10 s left no process is started
    ended = {run.method for run in runs if run.outcome.status == "timeout"}
    assert runs[-1].outcome.reason == "warm: not started, the time was up"
    assert {"sluice", "naive"} <= ended
    for scenario in scenarios:
        assert {run.method for run in runs if run.scenario == scenario.title} >= set(scenario.checkpoints)


def test_what_is_not_installed_is_a_row_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs(monkeypatch)
    scenario = gpu.scenarios_for("tiny", Path("folder"))[3]
    runs = list(_gpu_runner.run_within([scenario], deadline=1000.0, watch=watch))
    absent = [run.outcome for run in runs if run.method == "instanttensor"]
    assert absent == [Outcome(status="absent", reason="no kit")] * 2
    assert not any("instanttensor" in line for line in jobs.log)


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the command with a fake device; it takes the result of each task."""
    # Enough disk space for the whole puzzle, regardless of this machine.
    usage = SimpleNamespace(free=100 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def run(tasks: dict[str, dict[str, Any]], *arguments: str) -> Result:
        (tmp_path / "disk").mkdir()
        monkeypatch.setattr(gpu, "make_checkpoint", lambda path, *_: path.mkdir() if not path.suffix else path.touch())
        monkeypatch.setattr(gpu, "make_cold", lambda _: True)
        monkeypatch.setattr(puzzle, "make_file", lambda path, *_, **__: path.touch())
        monkeypatch.setattr(gpu, "run_task", lambda task, **_: dict(tasks[task["task"]]))
        monkeypatch.setattr(_machine, "device", lambda: "cpu")
        for name, value in (("is_available", True), ("mem_get_info", (100 * GIB, 140 * GIB))):
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        folders = ["--directory", str(tmp_path / "disk"), "--out", str(tmp_path / "out")]
        return CliRunner().invoke(gpu.main, ["--size", "tiny", *folders, *arguments])

    return run


SOLVED = {
    "seconds": 20.0,
    "read_bytes": 40 * 10**9,
    "host_growth_bytes": 100 * MIB,
    "device_allocated_bytes": 20 * 10**9,
    "device_reserved_bytes": 20 * 10**9,
    "wrong_matrices": 0,
    "computes": True,
}


def test_the_command_leaves_tables_goals_and_no_checkpoints(
    invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeJobs(monkeypatch)
    monkeypatch.setattr(gpu, "draw", lambda *_: "no picture: no matplotlib here")
    result = invoke({"pinned-copy": {"seconds": 1.0}, "puzzle": SOLVED})
    assert result.exit_code == 0, result.output
    assert list((tmp_path / "disk").iterdir()) == []
    assert "no picture: no matplotlib here" in result.output
    document = json.loads((tmp_path / "out/gpu.json").read_text())
    assert document["command"] == "python3 -m bench.gpu --size tiny --minutes 7.5"
    assert len(document["scenarios"]) == 5
    limits, device, solved, goals = (section["rows"] for section in document["sections"])
    assert limits[0] == {"what": "copy from page-locked memory", "seconds": "1.000", "GB/s": "0.03"}
    assert device[-1]["load"] == "the puzzle, bf16"
    assert {"what": "scale", "figure": "1.00 of the full puzzle"} in solved
    assert {"what": "wrong matrices", "figure": "0"} in solved
    verdicts = {goal["goal"]: goal["verdict"] for goal in goals}
    assert verdicts["GPT-2 tiny, .pth, fp32: warm"] == "reached"
    assert verdicts["GPT-2 tiny, .pth, fp32: ahead of torch-load"] == "missed"  # equal speed does not count as faster
    assert verdicts["the puzzle: every weight"] == "reached"
    markdown = (tmp_path / "out/gpu.md").read_text()
    assert "### Goals" in markdown
    assert "| naive |" in markdown
    assert "- no picture: no matplotlib here" in markdown


def test_failures_are_reported_and_do_not_stop_the_rest(
    invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeJobs(monkeypatch)
    result = invoke({"pinned-copy": {"reason": "no page-locked memory"}, "puzzle": {"reason": "killed"}})
    assert result.exit_code == 0, result.output
    limits, _, solved, goals = json.loads((tmp_path / "out/gpu.json").read_text())["sections"]
    assert limits["rows"][0]["seconds"] == "no page-locked memory"
    assert solved["rows"][-1] == {"what": "result", "figure": "killed"}
    verdicts = {goal["goal"]: goal["verdict"] for goal in goals["rows"]}
    assert verdicts["GPT-2 tiny, .pth, fp32: warm"] == "not measured"


def test_wrong_weights_fail_the_command(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs(monkeypatch)

    def lie(job: MethodJob, *, timeout_seconds: float) -> Outcome:
        outcome = jobs._run_job(job, timeout_seconds=timeout_seconds)
        wrong = Verdict(weights="other", logits=(1.0,))
        return dataclasses.replace(outcome, verdict=wrong) if job.method == "naive" and job.verify else outcome

    monkeypatch.setattr(_gpu_runner, "run_job", lie)
    result = invoke({"pinned-copy": {"seconds": 1.0}, "puzzle": SOLVED})
    assert result.exit_code == 1
    assert "wrong weights or logits: naive" in result.output


def test_too_little_time_for_the_puzzle_is_reported(
    invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeJobs(monkeypatch)
    monkeypatch.setattr(puzzle, "_EXTRA_SECONDS", 1000.0)
    result = invoke({"pinned-copy": {"seconds": 1.0}})
    assert result.exit_code == 0, result.output
    solved = json.loads((tmp_path / "out/gpu.json").read_text())["sections"][2]
    assert solved["rows"][-1]["figure"].startswith("not tried: disk, device or the ")
