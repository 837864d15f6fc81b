"""Run scenarios on a device until a deadline; runs that do not fit get a row with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sluice.benchmark.cache import make_cold, make_warm
from sluice.benchmark.methods import absence
from sluice.benchmark.process import run_job
from sluice.benchmark.records import MethodJob, MethodRun, Outcome, Precision, Scenario, State
from sluice.benchmark.runner import REFERENCE

__all__ = ["run_within"]

#: Least remaining seconds to start a process: the import of torch and a context take most of it.
_LEAST_SECONDS = 20.0

_PREPARATIONS: dict[State, Callable[[Path], bool]] = {"cold": make_cold, "warm": make_warm}

#: Calls a function and returns its outcome; used to watch a process.
Watch = Callable[[Scenario, str, State, Callable[[], Outcome]], Outcome]


def run_within(scenarios: Sequence[Scenario], *, deadline: float, watch: Watch) -> Iterator[MethodRun]:
    """Run every method once in each state and yield the runs, in order; all end by the deadline.

    The reference is generated once per dtype, from random numbers, for all scenarios of that dtype.

    Args:
        scenarios: Scenarios of one model.
        deadline: Time to end, on the clock of ``time.monotonic``.
        watch: Calls a load and returns its outcome.
    """
    truths: dict[Precision, Outcome] = {}
    for scenario in scenarios:
        first = scenario.states[0]
        if scenario.dtype not in truths:
            truths[scenario.dtype] = _run_job(scenario, REFERENCE, first, verify=True, deadline=deadline)
        yield _as_run(scenario, REFERENCE, first, truths[scenario.dtype])
        for state in scenario.states:
            for method in scenario.checkpoints:
                outcome = _run(scenario, method, state, deadline=deadline, watch=watch)
                yield _as_run(scenario, method, state, outcome)


def _run(scenario: Scenario, method: str, state: State, *, deadline: float, watch: Watch) -> Outcome:
    if absent := absence(method):
        return Outcome(status="absent", reason=absent)
    if _seconds_left(deadline) >= _LEAST_SECONDS and not _PREPARATIONS[state](scenario.checkpoints[method]):
        return Outcome(status="failed", reason=f"the page cache could not be made {state}")
    # Digests take longer than a load, so each method is verified once.
    verify = state == scenario.states[0]
    return watch(scenario, method, state, lambda: _run_job(scenario, method, state, verify=verify, deadline=deadline))


def _run_job(scenario: Scenario, method: str, state: State, *, verify: bool, deadline: float) -> Outcome:
    left = _seconds_left(deadline)
    if left < _LEAST_SECONDS:
        return Outcome(status="timeout", reason=f"{state}: not started, the time was up")
    job = MethodJob(
        method=method,
        model=scenario.model,
        checkpoint="" if method == REFERENCE else str(scenario.checkpoints[method]),
        dtype=scenario.dtype,
        device=scenario.device,
        verify=verify,
    )
    return run_job(job, timeout_seconds=left)


def _seconds_left(deadline: float) -> float:
    return deadline - time.monotonic()


def _as_run(scenario: Scenario, method: str, state: State, outcome: Outcome) -> MethodRun:
    return MethodRun(scenario=scenario.title, method=method, state=state, repetition=0, outcome=outcome)
