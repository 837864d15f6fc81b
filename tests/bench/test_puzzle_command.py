"""``python -m bench.puzzle``: its runs, its table, and when it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from bench import puzzle
from bench._puzzle import FULL, Puzzle, build
from sluice.benchmark.comparison import Checkpoints
from sluice.benchmark.records import MethodRun, Outcome, Scenario
from support.comparisons import TRUTH, good, killed

MIB = 1 << 20

Solve = Callable[..., Result]


def _runs(scenarios: Sequence[Scenario], *, ours: int, survives: bool) -> list[MethodRun]:
    """Return results in which ``naive`` takes twice F and is killed under a limit, and sluice takes the given bytes."""
    runs = []
    for each in scenarios:
        limited = each.host_limit_bytes is not None
        outcomes = dict.fromkeys(each.checkpoints, good("other", 2.0, 2 * each.final_bytes))
        outcomes["reference"] = Outcome(status="ok", verdict=TRUTH)
        outcomes["sluice"] = good("sluice", 1.0, ours)
        if limited:
            outcomes["naive"] = killed(1.0, each.final_bytes)
        if limited and not survives:
            outcomes["sluice"] = killed(1.0, ours)
        runs += [
            MethodRun(scenario=each.title, method=method, state="cold", repetition=0, outcome=outcome)
            for method, outcome in outcomes.items()
        ]
    return runs


@pytest.fixture
def solve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Solve:
    """Run the command at a small scale, without a checkpoint and without processes."""
    monkeypatch.setattr(puzzle, "make_file", lambda path, *_, **__: torch.save({"0.weight": torch.ones(1)}, path))
    monkeypatch.setattr(Checkpoints, "path_for", lambda *_: tmp_path)  # no copies of the file
    monkeypatch.setattr("sluice.benchmark.machine.device", lambda: "cpu")

    def run(*, ours: int, survives: bool = True, refusal: str | None = None) -> Result:
        def runner(_: Console, scenarios: Sequence[Scenario], **__: object) -> list[MethodRun]:
            return _runs(scenarios, ours=ours, survives=survives)

        monkeypatch.setattr(puzzle, "memory_limit_refusal", lambda: refusal)
        monkeypatch.setattr(puzzle, "run_with_progress", runner)
        arguments = ["--scale", "0.0134", "--directory", str(tmp_path), "--out", str(tmp_path / "out")]
        return CliRunner().invoke(puzzle.main, arguments)

    return run


def test_the_limits_are_those_of_the_issue() -> None:
    assert FULL.host_limit_bytes == 32 * 10**9
    assert Puzzle(layers=15).host_limit_bytes == pytest.approx(3.2e9, rel=0.01)
    assert [type(module).__name__ for module in build(2, 8)] == ["Linear", "Tanh", "Linear", "Tanh"]


def test_survivors_and_casualties_are_in_one_table(solve: Solve, tmp_path: Path) -> None:
    final = Puzzle(layers=2).final_bytes
    result = solve(ours=final + 70 * MIB)
    assert result.exit_code == 0, result.output
    markdown = (tmp_path / "out/puzzle.md").read_text()
    assert "| method | host, peak | peak / F | seconds, cold | under 0.4 GB of host memory |" in markdown
    assert "| naive | 512 MiB | 2.00 | 2.00 | killed at 256 MiB |" in markdown
    assert "| sluice | 326 MiB | 1.27 | 1.00 | survives, 1.00 s |" in markdown
    assert "there is no CUDA device, so its limit was not tried" in markdown
    assert "sluice grew by 326 MiB; F + staging + 64 MiB is 384 MiB" in result.output
    assert (tmp_path / "out/report.html").exists()


def test_more_than_the_bound_fails_the_command(solve: Solve) -> None:
    result = solve(ours=Puzzle(layers=2).final_bytes + 129 * MIB)
    assert result.exit_code == 1
    assert "Error: sluice grew by 385 MiB; F + staging + 64 MiB is 384 MiB" in result.output


def test_a_casualty_of_ours_fails_the_command(solve: Solve) -> None:
    result = solve(ours=Puzzle(layers=2).final_bytes, survives=False)
    assert result.exit_code == 1
    assert "sluice did not load it: out of memory" in result.output


def test_without_the_right_to_limit_memory_only_needs_are_shown(solve: Solve, tmp_path: Path) -> None:
    result = solve(ours=Puzzle(layers=2).final_bytes, refusal="run as root")
    assert result.exit_code == 0, result.output
    assert "no limit was tried: run as root" in result.output
    assert "| naive | 512 MiB | 2.00 | 2.00 | not tried |" in (tmp_path / "out/puzzle.md").read_text()
