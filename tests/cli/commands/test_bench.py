"""``sluice bench``: options, output and exit codes. tests/bench covers processes and timings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sluice.benchmark import comparison as _comparison
from sluice.benchmark import runner as _runner
from sluice.benchmark.loads import run_job
from sluice.benchmark.methods import LOADERS
from sluice.benchmark.records import Outcome
from sluice.cli.commands.bench import bench_command
from sluice.cli.comparison import END_SECONDS
from sluice.testing import memory_limit_refusal
from support.command_line import printed, refused, run_command
from support.comparisons import TRUTH, FakeRunner, job, trace

pytestmark = pytest.mark.usefixtures("directory")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    fake = FakeRunner()
    monkeypatch.setattr(_runner, "run_with_progress", fake)
    return fake


def test_a_built_in_size_is_compared_in_two_precisions_and_cleaned_up(runner: FakeRunner, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    result = printed("bench", "--size", "tiny", "--directory", "disk")
    assert [scenario.dtype for scenario in runner.scenarios] == ["float32", "bfloat16"]
    assert all(scenario.states == ("cold", "warm") for scenario in runner.scenarios)
    assert all(len(scenario.checkpoints) == 6 for scenario in runner.scenarios)
    assert runner.files == {"model.pth", "parameters"}
    assert list((tmp_path / "disk").iterdir()) == []
    assert (
        "fp32, cold: sluice 1.00 s with 1.00 F; the fastest and leanest other method was naive: 1.00 s with 1.00 F"
        in result
    )
    assert f"report: {tmp_path / 'bench-out' / 'report.html'}" in result
    assert {path.name for path in (tmp_path / "bench-out").iterdir()} == {"results.json", "results.md", "report.html"}


def test_without_a_size_the_machine_decides_it(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fitting_size(_folder: Path, _device: str, processes: int) -> tuple[str, float]:
        asked.append(processes)
        return "tiny", 99.0

    monkeypatch.setattr(_comparison, "fitting_size", fitting_size)
    result = run_command("bench", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert "GPT-2 tiny: about 99 s; --size chooses another" in result.stderr
    both = ("cold", "warm")
    assert [(each.model, each.dtype, each.states) for each in runner.scenarios] == [
        ("tiny", "float32", both), ("tiny", "bfloat16", both)
    ]  # fmt: skip
    assert END_SECONDS - 60 < runner.end_seconds < END_SECONDS
    assert json.loads(result.stdout)["command"] == "sluice bench --size tiny --device cpu"
    printed("bench", "--device", "cpu", "--dtype", "bf16", "--method", "sluice", "--method", "mmap", "--cold")
    # A reference for each dtype; in addition only the requested methods are counted.
    assert asked == [2 * (1 + 6 * 2), 1 + 2]


def test_a_full_disk_is_not_a_defect_of_sluice(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=100, used=99, free=1 << 20))
    result = refused("bench", "--size", "tiny", "--directory", "disk", code=1)
    text = " ".join(result.split())
    assert "a checkpoint of 33.2 MiB does not fit: 1.00 MiB are free; choose a smaller --size" in text
    assert "defect" not in text
    assert list(Path("disk").iterdir()) == []
    Path("file").touch()
    result = refused("bench", "--size", "tiny", "--out", "file/results", code=1)
    assert "file/results: Not a directory" in " ".join(result.split())


def test_an_own_model_is_loaded_from_its_own_checkpoint(runner: FakeRunner, tmp_path: Path) -> None:
    Path("net.pth").rename("n\udcff.pth")  # not UTF-8
    printed("bench", "n\udcff.pth", "--model", "cli_model:Net", "--model-args", "[4]", "--warm", "--out", "there")
    (scenario,) = runner.scenarios
    assert (scenario.model, scenario.model_args, scenario.dtype, scenario.states) == (
        "cli_model:Net", "[4]", "float32", ("warm",)
    )  # fmt: skip
    assert set(scenario.checkpoints) == {"naive", "sequential", "meta-sequential", "mmap", "sluice"}
    assert set(scenario.checkpoints.values()) == {tmp_path / "n\udcff.pth"} == {scenario.truth}
    assert scenario.final_bytes == 96
    assert "right" in (tmp_path / "there/results.md").read_text()


def test_results_are_json_and_nothing_else(runner: FakeRunner) -> None:
    result = printed(
        "bench", "--size", "tiny", "--method", "sluice", "--method", "mmap", "--dtype", "bf16", "--cold", "--json"
    )
    document = json.loads(result)
    assert document["command"] == "sluice bench --size tiny --method sluice --method mmap --dtype bf16 --cold"
    (scenario,) = document["scenarios"]
    assert [row["method"] for row in scenario["rows"]] == ["mmap", "sluice"]  # in the order of the tables
    assert [line["method"] for line in scenario["timelines"]] == ["mmap", "sluice"]
    assert len(scenario["timelines"][0]["seconds"]) == len(scenario["timelines"][0]["anon_bytes"]) > 10


def test_wrong_weights_fail_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runner, "run_with_progress", FakeRunner("abd"))
    assert "wrong weights: naive" in refused("bench", "--size", "tiny", "--method", "naive", code=1)


def test_a_peer_that_is_not_installed_is_a_row_with_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.benchmark.methods.find_spec", lambda name: None if name == "accelerate" else name)
    monkeypatch.setattr(_runner, "make_cold", lambda _: True)
    outcome = Outcome(status="ok", seconds=1.0, total_bytes=1, trace=trace(1.0, 1), verdict=TRUTH)
    monkeypatch.setattr(_runner, "run_job", lambda _job, **_: outcome)
    result = printed(
        "bench", "--size", "tiny", "--method", "accelerate", "--method", "sluice", "--dtype", "fp32", "--warm"
    )
    assert "absent" in result
    assert "accelerate: accelerate is not installed: pip install accelerate" in result


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("net.pth",), "CHECKPOINT and --model belong together"),
        (("--model", "cli_model:Net"), "CHECKPOINT and --model belong together"),
        (("net.pth", "--model", "cli_model:Net", "--size", "tiny"), "--size names a built-in model"),
        (("net.pth", "--model", "cli_model:Nothing"), "cli_model has no 'Nothing'"),
        (("--size", "tiny", "--method", "magic"), "there is no 'magic'; the methods are naive, "),
        (("--size", "huge"), "'huge' is not one of"),
    ],
)
def test_invalid_arguments_are_refused(runner: FakeRunner, arguments: tuple[str, ...], complaint: str) -> None:
    result = refused("bench", *arguments)
    assert complaint in " ".join(result.split())
    assert runner.scenarios == ()


def test_a_limit_that_the_system_does_not_permit_is_an_error_with_advice(
    runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.cli.commands.bench.memory_limit_refusal", lambda: "run as root")
    assert "--ram-limit: run as root" in refused("bench", "--size", "tiny", "--ram-limit", "2GiB", code=1)
    assert runner.scenarios == ()


def test_the_help_names_every_method() -> None:
    words = set(str(bench_command.help).replace(",", " ").split())
    assert set(LOADERS) <= words


@pytest.mark.long
@pytest.mark.skipif(memory_limit_refusal() is not None, reason=f"no memory limit: {memory_limit_refusal()}")
def test_under_a_limit_the_hungry_die_with_the_reason_and_the_lean_live(tmp_path: Path) -> None:
    path = tmp_path / "large.pth"
    torch.save({"weight": torch.ones(98304, 1024)}, path)  # 384 MiB
    limit = 850 << 20  # torch itself takes part of it

    def run(method: str) -> Outcome:
        embedding = {"model": "torch.nn:Embedding", "model_args": "[98304, 1024]"}
        return run_job(job(method, path, **embedding), host_limit_bytes=limit)

    lean = run("sluice")
    assert (lean.status, lean.reason) == ("ok", "")
    hungry = run("naive")
    assert hungry.status == "killed"
    assert hungry.reason == "out of memory: killed by the kernel at the limit of 850 MiB"
    assert hungry.trace is not None
    assert hungry.total_bytes > 200 << 20  # its progress when it was killed
