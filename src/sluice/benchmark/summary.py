"""Summarize runs: medians over repetitions, a row per method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from sluice.benchmark.records import MethodRun, Outcome, Precision, Scenario, State, Status, Verdict

__all__ = ["Row", "raw_seconds", "summarise", "typical_runs"]

#: Largest difference of logits, as a fraction of the largest logit: the alignment of weights in memory can change the
#: summation order of a matrix product. The weights themselves are compared bit by bit.
_TOLERANCES: dict[Precision, float] = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}


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
    #: ``seconds`` divided by those of the fastest raw read of the same state; empty without raw reads.
    over_raw: dict[State, float]
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
    #: Whether the finished model has the right weights and logits; None if not verified.
    right: bool | None


def raw_seconds(runs: Sequence[MethodRun], state: State) -> float | None:
    """Return the time of the fastest raw read of a state: the lower of the methods' medians."""
    methods = {run.method for run in runs if _is_raw(run.method)}
    own = [[run for run in runs if run.method == method] for method in methods]
    medians = [_medians(each, (state,), lambda outcome: outcome.seconds) for each in own]
    return min((each[state] for each in medians if state in each), default=None)


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
    truth = next((run.outcome.verdict for run in own if run.method == scenario.reference), None)
    raw = {state: raw_seconds(own, state) for state in scenario.states}
    return [_row(scenario, method, own, truth, raw) for method in scenario.checkpoints]


def _row(
    scenario: Scenario, method: str, runs: Sequence[MethodRun], truth: Verdict | None, raw: dict[State, float | None]
) -> Row:
    own = [run for run in runs if run.method == method]
    seconds = _medians(own, scenario.states, lambda outcome: outcome.seconds)
    over_raw = {state: value / bound for state, value in seconds.items() if (bound := raw[state])}
    verdicts = [run.outcome.verdict for run in own if run.outcome.verdict is not None]
    total = _peak(own, lambda outcome: outcome.total_bytes)
    reserved = _peak(own, lambda outcome: outcome.device_reserved_bytes)
    judged = reserved if scenario.device != "cpu" else total
    return Row(
        method=method,
        reasons=tuple(dict.fromkeys(run.outcome.reason for run in own if run.outcome.reason)),
        seconds=seconds,
        cpu_seconds=_medians(own, scenario.states, lambda outcome: outcome.cpu_seconds),
        everything_seconds=_medians(own, scenario.states, lambda outcome: outcome.everything_seconds),
        counts={state: len(_good(own, state)) for state in seconds},
        failures={run.state: run.outcome.status for run in own if run.state not in seconds},
        over_raw={} if _is_raw(method) else over_raw,
        anon_bytes=_peak(own, lambda outcome: outcome.anon_bytes),
        file_bytes=_peak(own, lambda outcome: outcome.file_bytes),
        shmem_bytes=_peak(own, lambda outcome: outcome.shmem_bytes),
        total_bytes=total,
        device_allocated_bytes=_peak(own, lambda outcome: outcome.device_allocated_bytes),
        device_reserved_bytes=reserved,
        over_final=None if _is_raw(method) else judged / scenario.final_bytes,
        right=all(_same(verdict, truth, scenario.dtype) for verdict in verdicts) if verdicts and truth else None,
    )


def _is_raw(method: str) -> bool:
    return method.startswith("raw-")


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


def _same(verdict: Verdict, truth: Verdict, dtype: Precision) -> bool:
    if verdict.weights != truth.weights or len(verdict.logits) != len(truth.logits):
        return False
    bound = _TOLERANCES[dtype] * max(map(abs, truth.logits), default=0.0)
    return all(abs(ours - right) <= bound for ours, right in zip(verdict.logits, truth.logits, strict=True))
