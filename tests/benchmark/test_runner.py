"""Runs of a comparison: their order, their rows and their tables."""

from __future__ import annotations

import dataclasses
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sluice.benchmark import runner as _runner
from sluice.benchmark.records import MethodJob, MethodRun, Outcome, Scenario, State
from sluice.benchmark.results import as_document, print_section, section_of, write_document
from sluice.benchmark.runner import finding, run_with_progress, summarise, typical_runs
from support.comparisons import FINAL_BYTES, MIB, TRUTH, good, killed, run_of, runs_of, scenario


def _scenario(*states: State, device: str = "cpu", methods: tuple[str, ...] = ("naive", "sluice")) -> Scenario:
    paths = {method: Path(f"/checkpoints/{method}") for method in methods}
    return dataclasses.replace(
        scenario(), title="a title", device=device, states=states, checkpoints=paths, final_bytes=1 << 30
    )


def _run(method: str, state: State = "cold", *, total_gib: float = 1.0, **fields: Any) -> MethodRun:
    total = int(total_gib * (1 << 30))
    usual: dict[str, Any] = {"status": "ok", "seconds": 1.0, "anon_bytes": total, "total_bytes": total}
    return run_of(_scenario(state), method, Outcome(**{**usual, **fields}), state)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace processes and the page cache by fakes that record the calls."""
    lines: list[str] = []

    def run_job(job: MethodJob, **_: object) -> Outcome:
        lines.append(f"{job.method} {Path(job.checkpoint).name} {'verify' if job.verify else ''}".strip())
        return Outcome(status="ok", seconds=1.0)

    def prepare(state: State, path: Path) -> bool:
        lines.append(f"{path.name} made {state}")
        return True

    for state in list(_runner._PREPARATIONS):
        monkeypatch.setitem(_runner._PREPARATIONS, state, partial(prepare, state))
    monkeypatch.setattr(_runner, "run_job", run_job)
    return lines


def _all_runs(*scenarios: Scenario, repetitions: int = 1) -> list[MethodRun]:
    return run_with_progress(Console(file=io.StringIO()), scenarios, repetitions=repetitions)


def test_methods_take_turns_and_the_cache_is_prepared_before_each(log: list[str]) -> None:
    runs = _all_runs(_scenario("cold", "warm"), repetitions=2)
    # sluice is first in the first repetition: its rows are there if time runs out.
    first = ["sluice made cold", "sluice sluice verify", "naive made cold", "naive naive verify"]
    first += ["sluice made warm", "sluice sluice verify", "naive made warm", "naive naive verify"]
    again = ["naive made cold", "naive naive", "sluice made cold", "sluice sluice"]  # starts with the other method
    again += ["naive made warm", "naive naive", "sluice made warm", "sluice sluice"]
    assert log == ["reference  verify", *first, *again]
    assert [run.repetition for run in runs] == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_a_reference_of_several_scenarios_runs_once(log: list[str]) -> None:
    one = _scenario("cold", methods=("naive",))
    runs = _all_runs(one, dataclasses.replace(one, title="another title"))
    assert [line for line in log if "reference" in line] == ["reference  verify"]
    assert [run.scenario for run in runs if run.method == "reference"] == ["a title", "another title"]


def test_what_does_not_start_in_time_has_a_row_with_the_reason(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sluice.benchmark.runner.time.monotonic", lambda: now[0])
    given: list[dict[str, Any]] = []

    def timed(_: MethodJob, **options: Any) -> Outcome:
        given.append(options)
        now[0] += 10
        return Outcome(status="ok", seconds=1.0)

    monkeypatch.setattr(_runner, "run_job", timed)
    console = Console(file=io.StringIO())
    runs = run_with_progress(
        console, [_scenario("cold")], repetitions=9, timeout_seconds=15, settle_seconds=3, end_seconds=20
    )
    # The reference and sluice, which claims memory three seconds after it; naive would begin at the end.
    assert given == [{"timeout_seconds": 15}, {"timeout_seconds": 15, "host_limit_bytes": None, "claim_time": 13}]
    assert [(run.method, run.outcome.status) for run in runs[:3]] == [
        *(("reference", "ok"), ("sluice", "ok"), ("naive", "skipped"))
    ]
    assert runs[2].outcome.reason == "cold: not started, the time was up"
    assert {run.repetition for run in runs} == {0}


def test_a_cache_that_cannot_be_prepared_fails_the_run(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_runner._PREPARATIONS, "cold", lambda _: False)
    runs = _all_runs(_scenario("cold", methods=("naive",)))
    assert runs[1].outcome == Outcome(status="failed", reason="the page cache could not be made cold")
    assert log == ["reference  verify"]


def test_every_run_is_a_line_without_a_terminal(log: list[str]) -> None:
    text = io.StringIO()
    run_with_progress(Console(file=text), [_scenario("cold")], repetitions=1)
    assert [line.strip() for line in text.getvalue().splitlines()] == [
        "1/3  reference float32 cold: 1.00 s",
        "2/3  sluice float32 cold: 1.00 s",
        "3/3  naive float32 cold: 1.00 s",
    ]


def test_rows_are_medians_and_the_worse_state_decides_memory() -> None:
    runs = [_run("naive", seconds=seconds, total_gib=gib) for seconds, gib in ((1, 1), (9, 9), (2, 2))]
    runs += [_run("naive", "warm", seconds=0.5, total_gib=3)]
    row = summarise(_scenario("cold", "warm", methods=("naive",)), runs)[0]
    assert row.seconds == {"cold": 2, "warm": 0.5}
    assert row.total_bytes == row.anon_bytes == 3 << 30
    assert row.over_final == 3


@pytest.mark.parametrize(
    ("reference", "found", "right"),
    [(TRUTH, TRUTH, True), (TRUTH, "abd", False), (TRUTH, None, None), (None, TRUTH, None)],
)
def test_a_model_is_right_when_weights_are_equal(reference: str | None, found: str | None, right: bool | None) -> None:
    runs = [_run("reference", status="ok" if reference else "killed", verdict=reference), _run("naive", verdict=found)]
    scenario = _scenario("cold", methods=("naive",))
    assert summarise(scenario, runs)[0].right is right
    assert ("NO" in _printed(scenario, runs)) == (right is False)


def test_a_failure_is_a_row_with_its_progress_and_does_not_spoil_the_figures_of_good_runs() -> None:
    scenario = _scenario("cold", methods=("naive",))
    killed = _run("naive", status="killed", total_gib=5, reason="memory")
    row = summarise(scenario, [killed, killed])[0]
    assert (row.failures, row.reasons, row.seconds) == ({"cold": "killed"}, ("memory",), {})
    assert row.total_bytes == 5 << 30
    row = summarise(scenario, [_run("naive", seconds=1), killed])[0]
    assert (row.failures, row.seconds, row.total_bytes, row.reasons) == ({}, {"cold": 1}, 1 << 30, ("memory",))


def _printed(scenario: Scenario, runs: list[MethodRun], *, width: int = 160) -> str:
    text = io.StringIO()
    print_section(Console(file=text, width=width), section_of(scenario, runs))
    return text.getvalue()


def test_the_table_shows_ratios_and_casualties() -> None:
    runs = [_run("reference", verdict=TRUTH), _run("sluice", seconds=1.5, total_gib=1.02, verdict=TRUTH)]
    runs += [_run("naive", status="killed", total_gib=2, reason="out of memory")]
    lines = _printed(_scenario("cold"), runs).splitlines()
    (naive,) = [line.replace(" ", "") for line in lines if "│ naive" in line]
    (ours,) = [line.replace(" ", "") for line in lines if "│ sluice" in line]
    assert naive == "│naive│2.00│2.00│0.00│2.00│killed│-│"
    assert ours == "│sluice│1.02│1.02│0.00│1.02│1.50│yes│"
    assert "  F = 1.00 GiB: the finished tensors" in lines
    assert "  naive: out of memory" in lines


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    methods = ("meta-sequential",)
    text = _printed(_scenario("cold", "warm", methods=methods), [_run(methods[0]), _run(methods[0], "warm")], width=80)
    assert "…" not in text


def test_on_an_accelerator_its_memory_is_shown_and_judged() -> None:
    memory: dict[str, Any] = {"anon_bytes": 0, "device_allocated_bytes": 5 << 29, "device_reserved_bytes": 3 << 30}
    runs = [_run("naive", total_gib=0.25, **memory)]
    scenario = _scenario("cold", device="cuda", methods=("naive",))
    assert summarise(scenario, runs)[0].over_final == 3
    text = _printed(scenario, runs)
    assert "alloc" in text
    assert "│0.25│0.00│0.00│2.50│3.00│3.00│1.00│" in text.replace(" ", "")


def test_results_are_written_as_json_and_markdown(tmp_path: Path) -> None:
    runs = [_run("reference", verdict=TRUTH), _run("naive", seconds=1.5, total_gib=2, verdict=TRUTH)]
    compared = _scenario("cold", methods=("naive",))
    results = as_document(machine={"date": "today"}, command="make demo", scenarios=[compared], runs=runs)
    write_document(tmp_path / "out", "results", results, [section_of(compared, runs)])
    document = json.loads((tmp_path / "out/results.json").read_text())
    (scenario,) = document["scenarios"]
    assert (document["command"], document["machine"]) == ("make demo", {"date": "today"})
    assert scenario["checkpoints"] == {"naive": "naive"}  # names, not paths of this machine
    assert scenario["rows"][0]["over_final"] == 2
    assert [run["seconds"] for run in scenario["runs"]] == [1.0, 1.5]
    markdown = (tmp_path / "out/results.md").read_text()
    assert "| naive | 2.00 | 2.00 | 0.00 | 2.00 | 1.50 | yes |" in markdown
    assert "Made by `make demo`" in markdown


def test_a_row_has_processor_time_and_everything() -> None:
    scenario = _scenario("cold", methods=("naive",))
    runs = [
        _run("naive", seconds=2.0, cpu_seconds=cpu, import_seconds=0.25, build_seconds=0.5) for cpu in (1.0, 3.0, 7.0)
    ]
    (row,) = summarise(scenario, runs)
    assert (row.cpu_seconds, row.everything_seconds, row.counts) == ({"cold": 3.0}, {"cold": 2.75}, {"cold": 3})


def _finding(outcomes: dict[str, Outcome], *, limit: int | None = None) -> str:
    """Return the sentence about these outcomes; the other methods were not compared."""
    one = scenario(limit=limit)
    compared = dataclasses.replace(one, checkpoints=dict.fromkeys(outcomes, Path("net.pth")))
    runs = [run for run in runs_of(one) if run.method == "reference"]
    runs += [run_of(one, method, outcome) for method, outcome in outcomes.items()]
    return finding(compared, "cold", summarise(compared, runs))


_OURS = good("sluice", 1.0, 520 * MIB)
_NAIVE = good("naive", 2.0, 2 * FINAL_BYTES)


def test_a_sentence_has_sluice_and_the_fastest_and_the_leanest_other_method() -> None:
    apart = {"mmap": good("mmap", 0.5, 600 * MIB), "per-parameter": good("per-parameter", 3.0, FINAL_BYTES)}
    assert _finding({"naive": _NAIVE, **apart, "sluice": _OURS}) == (
        "fp32, cold: sluice 1.00 s with 1.04 F; the fastest other method was mmap: 0.50 s with 1.20 F; "
        "the leanest other method was per-parameter: 3.00 s with 1.00 F"
    )
    assert _finding({"naive": _NAIVE, "sluice": _OURS}, limit=800 * MIB) == (
        "fp32, cold, limit 800 MiB: sluice 1.00 s with 1.04 F; "
        "the fastest and leanest other method was naive: 2.00 s with 2.00 F"
    )


def test_failures_are_stated() -> None:
    wrong = dataclasses.replace(_OURS, verdict="other")
    assert _finding({"naive": killed(1.0, MIB), "sluice": wrong}) == "fp32, cold: not finished, or wrong: naive, sluice"
    late = dataclasses.replace(killed(1.0, MIB), status="skipped")
    assert _finding({"naive": late, "sluice": _OURS}).endswith("1.04 F; the time was up for others")


def test_the_typical_run_is_the_one_in_the_middle() -> None:
    one = scenario()
    run = next(run for run in runs_of(one) if run.method == "sluice")
    runs = [
        dataclasses.replace(run, repetition=number, outcome=dataclasses.replace(run.outcome, seconds=seconds))
        for number, seconds in enumerate((3.0, 1.0, 2.0))
    ]
    last = dataclasses.replace(run.outcome, status="killed", seconds=0.0)
    (typical,) = typical_runs(one, [*runs, dataclasses.replace(run, repetition=3, outcome=last)])
    assert typical.outcome.seconds == 2.0
