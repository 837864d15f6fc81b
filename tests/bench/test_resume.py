"""Every way to resume ends with the same model and state; the command prints the cost of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench import resume
from bench._resuming import RESUMING, RESUMING_REFERENCE, Training, make_run, resumed_bytes
from bench.resume import main
from sluice.benchmark.loads import run_job, touch, verdict
from sluice.benchmark.records import MethodJob, Verdict
from support.comparisons import FakeRunner


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "tiny.run.pt"
    make_run(path, "tiny")
    return path


def job(path: Path, method: str) -> MethodJob:
    return MethodJob(method=method, model="tiny", checkpoint=str(path), dtype="float32", device="cpu", verify=False)


def test_every_way_ends_with_the_truth(run: Path) -> None:
    truth = None
    for method in (RESUMING_REFERENCE, *RESUMING):
        made = method.start(job(run, method.name))()
        assert isinstance(made, Training)
        touch(made)
        found = verdict(made)
        truth = truth or found
        assert found.weights == truth.weights, method.name
        assert torch.allclose(torch.tensor(found.logits), torch.tensor(truth.logits), atol=1e-4)
        held = sum(tensor.nbytes for tensor in made.state_dict().values())
        assert held == resumed_bytes("tiny")


def test_a_wrong_moment_is_seen(run: Path) -> None:
    made = RESUMING[-1].start(job(run, "sluice-resume"))()
    assert isinstance(made, Training)
    before = verdict(made)
    next(iter(made.optimizer.state.values()))["exp_avg"].view(-1)[0] += 1
    assert verdict(made).weights != before.weights


@pytest.mark.long
def test_a_process_of_its_own(run: Path) -> None:
    outcome = run_job(job(run, "sluice-resume"))
    assert (outcome.status, outcome.reason) == ("ok", "")
    assert resumed_bytes("tiny") * 0.99 <= outcome.total_bytes <= resumed_bytes("tiny") + resume.ALLOWED_BYTES


def test_the_command_writes_a_table_and_judges_sluice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = FakeRunner()
    monkeypatch.setattr(resume, "run_with_progress", runner)
    arguments = ["--size", "tiny", "--runs", "1", "--directory", str(tmp_path / "d"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "d" / "tiny.run.pt").stat().st_size > resumed_bytes("tiny")
    assert list(runner.scenarios[0].checkpoints) == ["raw-direct", *(method.name for method in RESUMING)]
    written = json.loads((tmp_path / "out" / "resume.json").read_text())
    assert written["command"] == "python -m bench.resume --size tiny --runs 1"

    monkeypatch.setattr(resume, "ALLOWED_BYTES", -1)
    failed = CliRunner().invoke(main, arguments)
    assert failed.exit_code == 1
    assert "more than the finished state" in failed.output


def test_the_command_fails_on_wrong_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resume, "run_with_progress", FakeRunner(Verdict(weights="other", logits=(1.0,))))
    (tmp_path / "tiny.run.pt").touch()
    arguments = ["--size", "tiny", "--runs", "1", "--directory", str(tmp_path), "--out", str(tmp_path / "out")]
    failed = CliRunner().invoke(main, arguments)
    assert failed.exit_code == 1
    assert "wrong weights, state or logits: " in failed.output
