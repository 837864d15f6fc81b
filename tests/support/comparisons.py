"""Fake runs of a comparison, for tests of tables, reports and the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sluice.benchmark.records import REFERENCE, MethodJob, MethodRun, Outcome, Precision, Scenario, State, Trace

MIB = 1 << 20

TRUTH = "abc"

#: Bytes of the finished model.
FINAL_BYTES = 500 * MIB

METHODS = ("naive", "mmap", "sluice")


def scenario(dtype: Precision = "float32", *, title: str = "GPT-2 small", limit: int | None = None) -> Scenario:
    return Scenario(
        title=f"{title}, {dtype}",
        model="small",
        dtype=dtype,
        device="cpu",
        states=("cold", "warm"),
        checkpoints={method: Path(f"/checkpoints/{method}.pth") for method in METHODS},
        final_bytes=FINAL_BYTES,
        host_limit_bytes=limit,
    )


def trace(seconds: float, peak_bytes: int, *, mapped: bool = False) -> Trace:
    """Return a load whose memory grows linearly up to its peak."""
    moments = range(101)
    grown = tuple(peak_bytes * moment // 100 for moment in moments)
    nothing = (0,) * len(grown)
    return Trace(
        seconds=tuple(seconds * moment / 100 for moment in moments),
        anon=nothing if mapped else grown,
        file=grown if mapped else nothing,
        shmem=nothing,
    )


def good(method: str, seconds: float, peak_bytes: int, *, mapped: bool = False) -> Outcome:
    return Outcome(
        status="ok",
        seconds=seconds,
        anon_bytes=0 if mapped else peak_bytes,
        file_bytes=peak_bytes if mapped else 0,
        total_bytes=peak_bytes,
        verdict=TRUTH,
        trace=trace(seconds, peak_bytes, mapped=mapped),
    )


def killed(seconds: float, peak_bytes: int) -> Outcome:
    return Outcome(
        status="killed",
        reason="out of memory: killed by the kernel at the limit of 800 MiB",
        anon_bytes=peak_bytes,
        total_bytes=peak_bytes,
        trace=trace(seconds, peak_bytes),
    )


def job(method: str, checkpoint: Path, **fields: Any) -> MethodJob:
    """Return the job to load a checkpoint of the tiny model to the CPU; ``fields`` replace others."""
    usual: dict[str, Any] = {"model": "tiny", "dtype": "float32", "device": "cpu", "verify": False}
    return MethodJob(method=method, checkpoint=str(checkpoint), **{**usual, **fields})


def run_of(each: Scenario, method: str, outcome: Outcome, state: State = "cold", repetition: int = 0) -> MethodRun:
    return MethodRun(scenario=each.title, method=method, state=state, repetition=repetition, outcome=outcome)


def runs_of(each: Scenario) -> list[MethodRun]:
    """Return the reference, and one run of each method in each state; ``naive`` is killed under a limit."""
    outcomes = {
        "naive": killed(1.0, 700 * MIB) if each.host_limit_bytes else good("naive", 2.0, 1000 * MIB),
        "mmap": good("mmap", 1.5, FINAL_BYTES, mapped=True),
        "sluice": good("sluice", 1.0, 520 * MIB),
    }
    truth = run_of(each, REFERENCE, Outcome(status="ok", verdict=TRUTH))
    runs = [run_of(each, method, outcome, state) for state in each.states for method, outcome in outcomes.items()]
    return [truth, *runs]


class FakeRunner:
    """A fake runner: records the scenarios and returns a successful run for each method and state."""

    def __init__(self, found: str = TRUTH) -> None:
        self.scenarios: Sequence[Scenario] = ()
        self.files: set[str] = set()
        self.end_seconds = 0.0
        self._found = found

    def __call__(
        self,
        _console: Console,
        scenarios: Sequence[Scenario],
        *,
        repetitions: int,
        end_seconds: float = 0.0,
        **_: object,
    ) -> list[MethodRun]:
        self.scenarios, self.end_seconds = scenarios, end_seconds
        self.files = {path.name for scenario in scenarios for path in scenario.checkpoints.values() if path.exists()}
        return [run for scenario in scenarios for run in self._runs(scenario, repetitions - 1)]

    def _runs(self, scenario: Scenario, repetition: int) -> list[MethodRun]:
        methods = {REFERENCE: TRUTH} | dict.fromkeys(scenario.checkpoints, self._found)
        outcomes = {
            method: replace(good(method, 1.0, scenario.final_bytes), verdict=verdict)
            for method, verdict in methods.items()
        }
        return [
            run_of(scenario, method, outcome, state, repetition)
            for method, outcome in outcomes.items()
            for state in scenario.states
        ]
