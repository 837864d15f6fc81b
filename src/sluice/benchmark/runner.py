"""Run scenarios: each method in its own process, methods interleaved, the page cache prepared before each run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from sluice.benchmark.loads import run_job
from sluice.benchmark.machine import make_cold, make_warm
from sluice.benchmark.methods import absence
from sluice.benchmark.process import TIMEOUT_SECONDS
from sluice.benchmark.records import REFERENCE, MethodJob, MethodRun, Outcome, Scenario, State

__all__ = ["run_with_progress"]

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


def _run(step: _Step, known: dict[MethodJob, Outcome], *, end: float, timeout_seconds: float) -> Outcome:
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
    """Run all scenarios with a progress bar, or without a terminal a line per run.

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
    schedule, known = list(_schedule(scenarios, repetitions)), dict[MethodJob, Outcome]()
    runs: list[MethodRun] = []
    end = time.monotonic() + end_seconds
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(schedule))
        for scenario, method, state, repetition in schedule:
            if repetition and time.monotonic() >= end:
                break
            bar.update(task, description=f"{method} {scenario.dtype} {state}")
            time.sleep(settle_seconds)
            step = (scenario, method, state, repetition)
            outcome = _run(step, known, end=end, timeout_seconds=timeout_seconds)
            runs.append(
                MethodRun(scenario=scenario.title, method=method, state=state, repetition=repetition, outcome=outcome)
            )
            bar.advance(task)
            result = f"{outcome.seconds:.2f} s" if outcome.status == "ok" else outcome.status
            line = f"{len(runs):>4}/{len(schedule)}  {method} {scenario.dtype} {state}: {result}"
            console.print(line, highlight=False, soft_wrap=True)
    return runs
