"""Runs scenarios: every method in its own process, the methods interleaved, the page cache prepared before each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sluice.benchmark._cache import make_cold, make_warm
from sluice.benchmark._methods import absence
from sluice.benchmark._process import TIMEOUT_SECONDS, run_job
from sluice.benchmark._records import REFERENCE, Job, Outcome, Run, Scenario, State

__all__ = ["REFERENCE", "run_scenarios", "run_with_progress"]

#: What to do to a checkpoint before a load; nothing before the second load in a row.
_PREPARATIONS: dict[State, Callable[[Path], bool]] = {"cold": make_cold, "first": make_cold, "warm": make_warm}


def _order(scenario: Scenario) -> list[tuple[str, State]]:
    """Return what one repetition runs; loads in a row belong together, other states are worked off one by one."""
    if "first" in scenario.states:
        return [(method, state) for method in scenario.checkpoints for state in scenario.states]
    return [(method, state) for state in scenario.states for method in scenario.checkpoints]


def run_scenarios(
    scenarios: Sequence[Scenario],
    *,
    repetitions: int,
    starting: Callable[[Scenario, str, State], None],
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Iterator[Run]:
    """Run everything and yield each run as it ends; the reference comes first, once for each scenario.

    Args:
        scenarios: What to run; every repetition goes through all of them.
        repetitions: How often.
        starting: Called before each run.
        timeout_seconds: When to stop a process.
    """
    run = partial(_run, timeout_seconds=timeout_seconds)
    for scenario in scenarios:
        starting(scenario, scenario.reference, scenario.states[0])
        yield run(scenario, scenario.reference, scenario.states[0], repetition=0)
    for repetition in range(repetitions):
        for scenario in scenarios:
            for method, state in _order(scenario):
                starting(scenario, method, state)
                yield run(scenario, method, state, repetition=repetition)


def _run(scenario: Scenario, method: str, state: State, *, repetition: int, timeout_seconds: float) -> Run:
    if method == scenario.reference:
        # Under no limit: it is no contestant, and without it nobody knows who is right.
        outcome = run_job(_job(scenario, method, scenario.truth, verify=True))
    elif reason := absence(method):
        outcome = Outcome(status="absent", reason=reason)
    elif (prepare := _PREPARATIONS.get(state)) and not prepare(scenario.checkpoints[method]):
        outcome = Outcome(status="failed", reason=f"the page cache could not be made {state}")
    else:
        # The digests take longer than a load, and a method that is right once is right the next time.
        job = _job(scenario, method, scenario.checkpoints[method], verify=repetition == 0)
        outcome = run_job(job, timeout_seconds=timeout_seconds, host_limit_bytes=scenario.host_limit_bytes)
    return Run(scenario=scenario.title, method=method, state=state, repetition=repetition, outcome=outcome)


def _job(scenario: Scenario, method: str, checkpoint: Path | None, *, verify: bool) -> Job:
    return Job(
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
) -> list[Run]:
    """Run everything behind a progress line; where there is no terminal, print a line for each run instead."""
    total = sum(1 + repetitions * len(_order(scenario)) for scenario in scenarios)
    bar = Progress(
        SpinnerColumn(),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        TextColumn("[dim]{task.fields[last]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("starting", total=total, last="")

        def starting(scenario: Scenario, method: str, state: State) -> None:
            bar.update(task, description=f"[bold]{method}[/] {scenario.dtype} {state}")

        runs = []
        for run in run_scenarios(
            scenarios, repetitions=repetitions, starting=starting, timeout_seconds=timeout_seconds
        ):
            runs.append(run)
            last = _one_line(run)
            bar.update(task, advance=1, last=last)
            if not console.is_terminal:
                console.print(f"{len(runs):>4}/{total}  {last}", highlight=False, soft_wrap=True)
    return runs


def _one_line(run: Run) -> str:
    outcome = run.outcome
    result = f"{outcome.seconds:.2f} s" if outcome.status == "ok" else outcome.status
    return f"{run.method} {run.state}: {result}"
