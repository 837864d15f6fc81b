"""Run scenarios: each method in its own process, methods interleaved, the page cache prepared before each run.

Runs are summarized: medians over repetitions, a row per method, and a sentence per table and state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from sluice._units import format_bytes
from sluice.benchmark.loads import run_job
from sluice.benchmark.machine import make_cold, make_warm
from sluice.benchmark.methods import absence
from sluice.benchmark.process import TIMEOUT_SECONDS
from sluice.benchmark.records import REFERENCE, SHORT_DTYPES, MethodJob, MethodRun, Outcome, Scenario, State, Status

__all__ = ["Row", "finding", "run_with_progress", "summarise", "typical_runs"]

#: Preparation of the checkpoint for each state.
_PREPARATIONS: dict[State, Callable[[Path], bool]] = {"cold": make_cold, "warm": make_warm}

#: A process to run: the scenario, the method, the state of the page cache, the number of the repetition from 0.
_Step = tuple[Scenario, str, State, int]


def _schedule(scenarios: Sequence[Scenario], repetitions: int) -> Iterator[_Step]:
    """Yield all steps: each reference once, then the repetitions of all scenarios.

    Each repetition starts with a different method, so that after-effects do not always hit the same method. The first
    one starts with the last method, which is sluice: its rows are there if time runs out.
    """
    for scenario in scenarios:
        yield scenario, REFERENCE, scenario.states[0], 0
    for repetition in range(repetitions):
        for scenario in scenarios:
            methods = list(scenario.checkpoints)
            begin = (repetition - 1) % max(1, len(methods))
            for state in scenario.states:
                yield from ((scenario, method, state, repetition) for method in methods[begin:] + methods[:begin])


def _run(
    step: _Step, known: dict[MethodJob, Outcome], *, end: float, timeout_seconds: float, claim_time: float
) -> Outcome:
    """Run one process; a reference that several scenarios share runs once."""
    scenario, method, state, repetition = step
    is_reference = method == REFERENCE
    checkpoint = scenario.truth if is_reference else scenario.checkpoints[method]
    job = MethodJob(
        method=method,
        model=scenario.model,
        model_args=scenario.model_args,
        checkpoint=str(checkpoint or ""),
        key=scenario.key if checkpoint == scenario.truth else None,
        dtype=scenario.dtype,
        device=scenario.device,
        # Digests take longer than a load, so only the first repetition is verified.
        verify=repetition == 0,
    )
    if is_reference and job in known:
        return known[job]
    if reason := absence(method):
        return Outcome(status="absent", reason=reason)
    if time.monotonic() >= end:
        return Outcome(status="skipped", reason=f"{state}: not started, the time was up")
    if is_reference:  # without a limit: it does not compete, and the verdicts need it
        known[job] = run_job(job, timeout_seconds=timeout_seconds)
        return known[job]
    if not _PREPARATIONS[state](scenario.checkpoints[method]):
        return Outcome(status="failed", reason=f"the page cache could not be made {state}")
    return run_job(
        job, timeout_seconds=timeout_seconds, host_limit_bytes=scenario.host_limit_bytes, claim_time=claim_time
    )


def run_with_progress(
    console: Console,
    scenarios: Sequence[Scenario],
    *,
    repetitions: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
    settle_seconds: float = 0.0,
    end_seconds: float = math.inf,
) -> list[MethodRun]:
    """Run all scenarios with a progress bar, or without a terminal a line per run.

    Args:
        console: Console for the progress.
        scenarios: The scenarios.
        repetitions: Number of repetitions.
        timeout_seconds: Time limit of a run.
        settle_seconds: Least time between a run and the claim of memory of the next one, which imports meanwhile.
        end_seconds: Time after which no run starts: a method without a run has a row with the reason.

    Returns:
        Every run, in order.
    """
    schedule, known = list(_schedule(scenarios, repetitions)), dict[MethodJob, Outcome]()
    runs: list[MethodRun] = []
    end = time.monotonic() + end_seconds
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(schedule))
        for step in schedule:
            scenario, method, state, repetition = step
            if repetition and time.monotonic() >= end:
                break
            bar.update(task, description=f"{method} {scenario.dtype} {state}")
            claim_time = time.monotonic() + settle_seconds
            outcome = _run(step, known, end=end, timeout_seconds=timeout_seconds, claim_time=claim_time)
            runs.append(
                MethodRun(scenario=scenario.title, method=method, state=state, repetition=repetition, outcome=outcome)
            )
            bar.advance(task)
            result = f"{outcome.seconds:.2f} s" if outcome.status == "ok" else outcome.status
            line = f"{len(runs):>4}/{len(schedule)}  {method} {scenario.dtype} {state}: {result}"
            console.print(line, highlight=False, soft_wrap=True)
    return runs


#: Figures of an outcome that a row has: times by state, and peaks of memory.
_TIMES = ("seconds", "cpu_seconds", "everything_seconds")
_PEAKS = (
    *("anon_bytes", "file_bytes", "shmem_bytes", "total_bytes"),
    *("device_allocated_bytes", "device_reserved_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method of one scenario: medians over the repetitions, and for memory the largest median of the states."""

    #: Name of the method.
    method: str
    #: Distinct reasons of failed runs.
    reasons: tuple[str, ...]
    #: Seconds from the call until every weight was touched, by state with a successful run; processor time; with
    #: imports and the building of the empty model.
    seconds: dict[State, float]
    cpu_seconds: dict[State, float]
    everything_seconds: dict[State, float]
    #: Number of successful runs of each state in ``seconds``.
    counts: dict[State, int]
    #: Status of the last run, by state without a successful run.
    failures: dict[State, Status]
    #: Peak growth of host memory by kind, in bytes; for a failed method, until its failure.
    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    total_bytes: int
    #: Peak of accelerator memory, in bytes; 0 without an accelerator.
    device_allocated_bytes: int
    device_reserved_bytes: int
    #: ``total_bytes`` divided by F, or for an accelerator ``device_reserved_bytes`` divided by F; None for a raw read.
    over_final: float | None
    #: Whether the finished model has the right weights; None if not verified.
    right: bool | None


def typical_runs(scenario: Scenario, runs: Sequence[MethodRun]) -> Iterator[MethodRun]:
    """Yield for each method and state of a scenario the run that represents its repetitions.

    That is the median by seconds of the successful runs; if none succeeded, the last run.
    """
    for state in scenario.states:
        for method in scenario.checkpoints:
            same = [run for run in runs if (run.scenario, run.method, run.state) == (scenario.title, method, state)]
            good = sorted((run for run in same if run.outcome.status == "ok"), key=lambda run: run.outcome.seconds)
            if same:
                yield good[(len(good) - 1) // 2] if good else same[-1]


def summarise(scenario: Scenario, runs: Sequence[MethodRun]) -> list[Row]:
    """Return the rows of a scenario, in the order of its methods."""
    own = [run for run in runs if run.scenario == scenario.title]
    truth = next((run.outcome.verdict for run in own if run.method == REFERENCE), None)
    return [_row(scenario, method, own, truth) for method in scenario.checkpoints]


def finding(scenario: Scenario, state: State, rows: Sequence[Row]) -> str:
    """Return what one table says about one state: sluice, the fastest and the leanest other method, and failures."""
    limit = "" if scenario.host_limit_bytes is None else f", limit {format_bytes(scenario.host_limit_bytes)}"
    loaders = {row.method: row for row in rows if row.over_final is not None}
    good = {
        name: (row.seconds[state], row.over_final or 0.0)
        for name, row in loaders.items()
        if state in row.seconds and row.right is not False
    }
    others = [name for name in good if not name.startswith("sluice")]
    clauses = [f"{name} {_figures(good[name])}" for name in good if name not in others]
    best = {min(others, key=good.__getitem__): "fastest"} if others else {}
    if others:
        leanest = min(others, key=lambda name: good[name][::-1])
        best[leanest] = "fastest and leanest" if leanest in best else "leanest"
    clauses += [f"the {which} other method was {name}: {_figures(good[name])}" for name, which in best.items()]
    reasons = {name: row.failures.get(state) for name, row in loaders.items() if name not in good}
    failed = [name for name, reason in reasons.items() if reason not in {"absent", "skipped"}]
    clauses += [f"not finished, or wrong: {', '.join(failed)}"] if failed else []
    clauses += ["the time was up for others"] if "skipped" in reasons.values() else []
    return f"{SHORT_DTYPES[scenario.dtype]}, {state}{limit}: {'; '.join(clauses)}"


def _figures(good: tuple[float, float]) -> str:
    return f"{good[0]:.2f} s with {good[1]:.2f} F"


def _row(scenario: Scenario, method: str, runs: Sequence[MethodRun], truth: str | None) -> Row:
    own = [run for run in runs if run.method == method]
    figures: dict[str, Any] = {name: _medians(own, scenario.states, attrgetter(name)) for name in _TIMES}
    figures |= {name: _peak(own, attrgetter(name)) for name in _PEAKS}
    seconds = figures["seconds"]
    verdicts = {run.outcome.verdict for run in own} - {None}
    judged = figures["device_reserved_bytes" if scenario.device != "cpu" else "total_bytes"]
    return Row(
        method=method,
        reasons=tuple(dict.fromkeys(run.outcome.reason for run in own if run.outcome.reason)),
        counts={state: len(_good(own, state)) for state in seconds},
        failures={run.state: run.outcome.status for run in own if run.state not in seconds},
        **figures,
        over_final=None if method.startswith("raw-") else judged / scenario.final_bytes,
        right=verdicts == {truth} if verdicts and truth else None,
    )


def _good(runs: Sequence[MethodRun], state: State) -> list[Outcome]:
    return [run.outcome for run in runs if run.state == state and run.outcome.status == "ok"]


def _medians(
    runs: Sequence[MethodRun], states: Sequence[State], figure: Callable[[Outcome], float]
) -> dict[State, float]:
    """Return the median of a figure of one method, by state with a successful run."""
    outcomes = {state: _good(runs, state) for state in states}
    return {state: median(map(figure, good)) for state, good in outcomes.items() if good}


def _peak(runs: Sequence[MethodRun], kind: Callable[[Outcome], int]) -> int:
    """Return the largest median of the states of one kind of memory; failed runs count only if none succeeded."""
    measured = [run for run in runs if run.outcome.status == "ok"] or runs
    states = {run.state for run in measured}
    return int(max(median(kind(run.outcome) for run in measured if run.state == state) for state in states))
