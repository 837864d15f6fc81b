"""Run scenarios: each method in its own process, methods interleaved, the page cache prepared before each run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sluice.benchmark.cache import make_cold, make_warm
from sluice.benchmark.methods import absence
from sluice.benchmark.process import TIMEOUT_SECONDS, run_job
from sluice.benchmark.records import REFERENCE, MethodJob, MethodRun, Outcome, Scenario, State

__all__ = ["REFERENCE", "contends", "run_with_progress", "seconds_left"]

#: Preparation of the checkpoint for each state; none before the second and third load in a row.
_PREPARATIONS: dict[State, Callable[[Path], bool]] = {
    "cold": make_cold,
    "lazy": make_cold,
    "first": make_cold,
    "warm": make_warm,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One process to run."""

    scenario: Scenario
    method: str
    state: State
    #: Number of the repetition, from 0.
    repetition: int = 0


def _order(scenario: Scenario, repetition: int) -> list[tuple[str, State]]:
    """Return the runs of one repetition: loads in a row follow each other, other states run one after the other.

    Each repetition starts with a different method, so that after-effects do not always hit the same method.
    """
    methods = list(scenario.checkpoints)
    begin = repetition % max(1, len(methods))
    methods = methods[begin:] + methods[:begin]
    if "first" in scenario.states:
        return [(method, state) for method in methods for state in scenario.states]
    return [(method, state) for state in scenario.states for method in methods]


def _schedule(scenarios: Sequence[Scenario], repetitions: int) -> list[_Step]:
    """Return all steps: each reference once, then the repetitions of all scenarios."""
    references = [_Step(scenario=each, method=each.reference, state=each.states[0]) for each in scenarios]
    return references + [
        _Step(scenario=scenario, method=method, state=state, repetition=repetition)
        for repetition in range(repetitions)
        for scenario in scenarios
        for method, state in _order(scenario, repetition)
    ]


def seconds_left(last_seconds: Mapping[str, float], ahead: Sequence[str]) -> float:
    """Estimate the time of the remaining runs from the last run of each method, or else from the average.

    Args:
        last_seconds: Seconds of the last run of each method that has run; not empty.
        ahead: Method of each remaining run.
    """
    usual = sum(last_seconds.values()) / len(last_seconds)
    return sum(last_seconds.get(method, usual) for method in ahead)


#: A method is repeated if in some state it takes at most this many times as long as sluice.
_CLOSE = 1.5


def contends(runs: Sequence[MethodRun], scenario: str, method: str) -> bool:
    """Return whether more runs of a method could change who is the fastest.

    Raw reads and sluice always contend; another method if in some state of the scenario it was faster than one and a
    half times sluice.

    Args:
        runs: The runs so far.
        scenario: Title of the scenario.
        method: Name of the method.
    """
    if method.startswith(("raw-", "sluice")):
        return True
    best: dict[tuple[bool, State], float] = {}
    for run in runs:
        ours = run.method.startswith("sluice")
        if run.scenario == scenario and (ours or run.method == method) and run.outcome.status == "ok":
            key = (ours, run.state)
            best[key] = min(best.get(key, math.inf), run.outcome.seconds)
    return any(
        seconds <= _CLOSE * best.get((True, state), math.inf) for (ours, state), seconds in best.items() if not ours
    )


def _run(step: _Step, *, timeout_seconds: float, settle_seconds: float) -> MethodRun:
    scenario, method, state = step.scenario, step.method, step.state
    if method == scenario.reference:
        # Without limits: it does not compete, and the verdicts need it.
        outcome = run_job(_job(scenario, method, scenario.truth, verify=True))
    elif reason := absence(method):
        outcome = Outcome(status="absent", reason=reason)
    elif (prepare := _PREPARATIONS.get(state)) and not prepare(scenario.checkpoints[method]):
        outcome = Outcome(status="failed", reason=f"the page cache could not be made {state}")
    else:
        # Digests take longer than a load, so only the first repetition is verified.
        job = _job(scenario, method, scenario.checkpoints[method], verify=step.repetition == 0)
        job = replace(job, claim_memory=state != "lazy")
        time.sleep(settle_seconds)
        outcome = run_job(job, timeout_seconds=timeout_seconds, host_limit_bytes=scenario.host_limit_bytes)
    return MethodRun(scenario=scenario.title, method=method, state=state, repetition=step.repetition, outcome=outcome)


def _job(scenario: Scenario, method: str, checkpoint: Path | None, *, verify: bool) -> MethodJob:
    return MethodJob(
        method=method,
        model=scenario.model,
        model_args=scenario.model_args,
        checkpoint=str(checkpoint or ""),
        key=scenario.key if checkpoint == scenario.truth else None,
        dtype=scenario.dtype,
        device=scenario.device,
        device_limit_bytes=scenario.device_limit_bytes,
        verify=verify,
    )


def run_with_progress(
    console: Console,
    scenarios: Sequence[Scenario],
    *,
    repetitions: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
    settle_seconds: float = 0.0,
    budget_seconds: float = math.inf,
) -> list[MethodRun]:
    """Run all scenarios with a progress line, or without a terminal a line per run.

    Args:
        console: Console for the progress.
        scenarios: The scenarios.
        repetitions: Number of repetitions.
        timeout_seconds: Time limit of a run.
        settle_seconds: Pause before each load, after the previous process has ended and the page cache is prepared; see
            ``settling_seconds``.
        budget_seconds: Time after which no repetition starts; the first run of each method always takes place. With a
            budget, only methods that contend are repeated.

    Returns:
        Every run, in order.
    """
    schedule = _schedule(scenarios, repetitions)
    bar = Progress(
        SpinnerColumn(),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}"),
        TextColumn("[dim]{task.fields[last]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    runs: list[MethodRun] = []
    last_seconds: dict[str, float] = {}
    started = time.perf_counter()
    with bar:
        task = bar.add_task("starting", total=len(schedule), left="", last="")
        for number, step in enumerate(schedule, start=1):
            if step.repetition and budget_seconds < math.inf:
                over = time.perf_counter() - started + last_seconds[step.method] > budget_seconds
                if over or not contends(runs, step.scenario.title, step.method):
                    bar.update(task, advance=1)
                    continue
            bar.update(task, description=f"[bold]{step.method}[/] {step.scenario.dtype} {step.state}")
            begin = time.perf_counter()
            runs.append(_run(step, timeout_seconds=timeout_seconds, settle_seconds=settle_seconds))
            last_seconds[step.method] = time.perf_counter() - begin
            left = f"about {seconds_left(last_seconds, [ahead.method for ahead in schedule[number:]]):.0f} s left"
            last = _one_line(runs[-1])
            bar.update(task, advance=1, left=left, last=last)
            if not console.is_terminal:
                console.print(f"{number:>4}/{len(schedule)}  {last}, {left}", highlight=False, soft_wrap=True)
    return runs


def _one_line(run: MethodRun) -> str:
    outcome = run.outcome
    result = f"{outcome.seconds:.2f} s" if outcome.status == "ok" else outcome.status
    return f"{run.method} {run.state}: {result}"
