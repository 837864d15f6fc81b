"""Run scenarios: each method in its own process, methods interleaved, the page cache prepared before each run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sluice.benchmark.cache import make_cold, make_warm
from sluice.benchmark.loads import run_job
from sluice.benchmark.methods import absence
from sluice.benchmark.process import TIMEOUT_SECONDS
from sluice.benchmark.records import MethodJob, MethodRun, Outcome, Scenario, State

__all__ = ["run_with_progress", "seconds_left"]

#: Preparation of the checkpoint for each state.
_PREPARATIONS: dict[State, Callable[[Path], bool]] = {"cold": make_cold, "warm": make_warm}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One process to run."""

    scenario: Scenario
    method: str
    state: State
    #: Number of the repetition, from 0.
    repetition: int = 0


def _schedule(scenarios: Sequence[Scenario], repetitions: int) -> list[_Step]:
    """Return all steps: each reference once, then the repetitions of all scenarios.

    Each repetition starts with a different method, so that after-effects do not always hit the same method. The first
    one starts with the last method, which is sluice: its rows are there if time runs out.
    """
    steps = [_Step(scenario=each, method=each.reference, state=each.states[0]) for each in scenarios]
    for repetition in range(repetitions):
        for scenario in scenarios:
            methods = list(scenario.checkpoints)
            begin = (repetition - 1) % max(1, len(methods))
            steps += [
                _Step(scenario=scenario, method=method, state=state, repetition=repetition)
                for state in scenario.states
                for method in [*methods[begin:], *methods[:begin]]
            ]
    return steps


def seconds_left(last_seconds: Mapping[str, float], ahead: Sequence[str]) -> float:
    """Estimate the time of the remaining runs from the last run of each method, or else from the average.

    Args:
        last_seconds: Seconds of the last run of each method that has run; not empty.
        ahead: Method of each remaining run.
    """
    usual = sum(last_seconds.values()) / len(last_seconds)
    return sum(last_seconds.get(method, usual) for method in ahead)


def _run(step: _Step, known: dict[MethodJob, Outcome], *, end: float, timeout_seconds: float) -> Outcome:
    """Run one process; a reference that several scenarios share runs once."""
    scenario, method, state = step.scenario, step.method, step.state
    is_reference = method == scenario.reference
    checkpoint = scenario.truth if is_reference else scenario.checkpoints[method]
    job = MethodJob(
        method=method,
        model=scenario.model,
        model_args=scenario.model_args,
        checkpoint=str(checkpoint or ""),
        key=scenario.key if checkpoint == scenario.truth else None,
        dtype=scenario.dtype,
        device=scenario.device,
        # A reference has no limits: it does not compete, and the verdicts need it.
        device_limit_bytes=None if is_reference else scenario.device_limit_bytes,
        # Digests take longer than a load, so only the first repetition is verified.
        verify=step.repetition == 0,
    )
    if is_reference and job in known:
        return known[job]
    if reason := absence(method):
        return Outcome(status="absent", reason=reason)
    if time.monotonic() >= end:
        return Outcome(status="skipped", reason=f"{state}: not started, the time was up")
    if is_reference:
        known[job] = run_job(job, timeout_seconds=timeout_seconds)
        return known[job]
    if not _PREPARATIONS[state](scenario.checkpoints[method]):
        return Outcome(status="failed", reason=f"the page cache could not be made {state}")
    return run_job(job, timeout_seconds=timeout_seconds, host_limit_bytes=scenario.host_limit_bytes)


def run_with_progress(
    console: Console,
    scenarios: Sequence[Scenario],
    *,
    repetitions: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
    settle_seconds: float = 0.0,
    end_seconds: float = math.inf,
) -> list[MethodRun]:
    """Run all scenarios with a progress line, or without a terminal a line per run.

    Args:
        console: Console for the progress.
        scenarios: The scenarios.
        repetitions: Number of repetitions.
        timeout_seconds: Time limit of a run.
        settle_seconds: Pause before each run.
        end_seconds: Time after which no run starts: a method without a run has a row with the reason.

    Returns:
        Every run, in order.
    """
    schedule, known = _schedule(scenarios, repetitions), dict[MethodJob, Outcome]()
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
    started = time.monotonic()
    with bar:
        task = bar.add_task("starting", total=len(schedule), left="", last="")
        for number, step in enumerate(schedule, start=1):
            begin = time.monotonic()
            if step.repetition and begin - started >= end_seconds:
                break
            bar.update(task, description=f"[bold]{step.method}[/] {step.scenario.dtype} {step.state}")
            time.sleep(settle_seconds)
            outcome = _run(step, known, end=started + end_seconds, timeout_seconds=timeout_seconds)
            runs.append(_as_run(step, outcome))
            last_seconds[step.method] = time.monotonic() - begin
            left = f"about {seconds_left(last_seconds, [ahead.method for ahead in schedule[number:]]):.0f} s left"
            result = f"{outcome.seconds:.2f} s" if outcome.status == "ok" else outcome.status
            last = f"{step.method} {step.state}: {result}"
            bar.update(task, advance=1, left=left, last=last)
            if not console.is_terminal:
                console.print(f"{number:>4}/{len(schedule)}  {last}, {left}", highlight=False, soft_wrap=True)
    return runs


def _as_run(step: _Step, outcome: Outcome) -> MethodRun:
    title = step.scenario.title
    return MethodRun(scenario=title, method=step.method, state=step.state, repetition=step.repetition, outcome=outcome)
