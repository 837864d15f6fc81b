"""State what a comparison found: one headline, and one sentence per table and state of the page cache.

A sentence names seconds and peak of sluice, those of the usual way to load, and each way that did better. All figures
are those of the tables, as rounded there: equal texts are never called faster or leaner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sluice._units import format_bytes
from sluice.benchmark.records import MethodRun, Scenario, State
from sluice.benchmark.summary import Row, summarise

__all__ = ["explain_final_bytes", "findings", "headline"]

#: The usual way to load, and its name in sentences; the first one that was compared is named in every sentence.
_USUAL = {"naive": "plain torch.load", "torch-load": "plain torch.load"}

#: States of the page cache as adjectives of a load.
_STATES: dict[State, str] = {
    "cold": "cold",
    "warm": "cached",
    "lazy": "cold, memory not claimed",
    "first": "first load",
    "second": "second load",
    "third": "third load",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A successful method in one state, with its figures as texts."""

    #: Name of the method in sentences.
    name: str
    #: Seconds, rounded as in the tables.
    seconds: str
    #: Peak as a multiple of F, rounded as in the tables.
    peak: str

    @property
    def figures(self) -> str:
        return f"{self.seconds} s with {self.peak} F"

    def beats(self, other: _Result) -> str:
        """Return in what this result is better than another, as an adjective; empty if in nothing."""
        gains = [
            ("faster", float(self.seconds) < float(other.seconds)),
            ("leaner", float(self.peak) < float(other.peak)),
        ]
        return " and ".join(adjective for adjective, holds in gains if holds)


def headline(subject: str, scenarios: Sequence[Scenario], runs: Sequence[MethodRun]) -> str:
    """Return the finding of the first table in its first state.

    Args:
        subject: What was loaded, such as ``"GPT-2 large"``.
        scenarios: The scenarios, at least one.
        runs: Their runs.
    """
    scenario = scenarios[0]
    state = scenario.states[0]
    what = f"{subject} ({scenario.short_dtype}, {_STATES[state]}{_limit(scenario)})"
    return _finding(what, state, summarise(scenario, runs))


def findings(scenarios: Sequence[Scenario], runs: Sequence[MethodRun]) -> Iterator[str]:
    """Yield one sentence per scenario and state."""
    for scenario in scenarios:
        rows = summarise(scenario, runs)
        for state in scenario.states:
            place = f"{scenario.short_dtype}, {_STATES[state]}{_limit(scenario)}"
            yield f"{place}: {_finding('', state, rows)}."


def explain_final_bytes(scenarios: Sequence[Scenario]) -> str:
    """Return what F is, with its size for each dtype of the comparison."""
    sizes = dict.fromkeys(f"{format_bytes(each.final_bytes)} in {each.short_dtype}" for each in scenarios)
    memory = "GPU memory" if scenarios[0].device != "cpu" else "host memory"
    return (
        f"F is the size of the finished model: {', '.join(sizes)}. Every peak is growth of {memory} during the load: "
        "1.00 F is the model alone, 2.00 F a second copy of it."
    )


def _limit(scenario: Scenario) -> str:
    return "" if scenario.host_limit_bytes is None else f", limit {format_bytes(scenario.host_limit_bytes)}"


def _finding(what: str, state: State, rows: Sequence[Row]) -> str:
    """Return the sentence without its end; ``what`` is the object of "loaded", or empty."""
    loaders = [row for row in rows if row.over_final is not None]
    ours = next((row for row in loaders if _is_ours(row)), None)
    usual = next((row for name in _USUAL for row in loaders if row.method == name), None)
    others = [row for row in loaders if not _is_ours(row) and row is not usual]
    rest = [result for row in others if (result := _result(row, state))]
    if ours is None:
        return _without_ours(what, usual, rest, state)
    mine = _result(ours, state)
    if mine is None:
        link = "into" if ours.right is False else "while it loaded"
        clauses = [f"sluice {_failure(ours, state)}" + (f" {link} {what}" if what else "")]
        clauses += [_usual_clause(usual, state, None)] if usual else []
        clauses += _best_of(rest)
    else:
        clauses = [f"sluice loaded {what} in {mine.figures}" if what else f"sluice took {mine.figures}"]
        clauses += [_usual_clause(usual, state, mine)] if usual else []
        clauses += _better(rest, mine)
    dead = [row.method for row in others if _result(row, state) is None and row.failures.get(state) != "absent"]
    return "; ".join([*clauses, *([f"did not finish: {', '.join(dead)}"] if dead else [])])


def _without_ours(what: str, usual: Row | None, rest: list[_Result], state: State) -> str:
    finished = [*([result] if usual and (result := _result(usual, state)) else []), *rest]
    if not finished:
        return f"no method loaded {what}" if what else "no method finished"
    best = min(finished, key=lambda result: float(result.seconds))
    return f"{best.name} loaded {what} in {best.figures}" if what else f"{best.name} was the fastest: {best.figures}"


def _usual_clause(usual: Row, state: State, mine: _Result | None) -> str:
    result = _result(usual, state)
    if result is None:
        return f"{_name(usual)} {_failure(usual, state)}"
    if mine and (gain := result.beats(mine)):
        return f"{result.name} was {gain}: {result.figures}"
    return f"{result.name} took {result.figures}"


def _better(rest: Sequence[_Result], mine: _Result) -> Iterator[str]:
    """Yield a clause for the fastest of the faster methods, and one for the leanest of the leaner ones."""
    faster = [result for result in rest if "faster" in result.beats(mine)]
    leaner = [result for result in rest if "leaner" in result.beats(mine)]
    fastest = min(faster, key=lambda result: (float(result.seconds), float(result.peak)), default=None)
    leanest = min(leaner, key=lambda result: (float(result.peak), float(result.seconds)), default=None)
    if fastest:
        yield f"{fastest.name} was {fastest.beats(mine)}: {fastest.figures}"
    if leanest and not (fastest and float(fastest.peak) <= float(leanest.peak)):
        yield f"{leanest.name} was {leanest.beats(mine)}: {leanest.figures}"


def _best_of(rest: Sequence[_Result]) -> list[str]:
    best = min(rest, key=lambda result: float(result.seconds), default=None)
    return [f"{best.name} took {best.figures}"] if best else []


def _result(row: Row, state: State) -> _Result | None:
    """Return the result of a method; None if it did not finish or loaded wrong weights."""
    if state not in row.seconds or row.over_final is None or row.right is False:
        return None
    return _Result(name=_name(row), seconds=f"{row.seconds[state]:.2f}", peak=f"{row.over_final:.2f}")


def _failure(row: Row, state: State) -> str:
    if row.right is False:
        return "loaded wrong weights"
    status = row.failures.get(state, "failed")
    return {"killed": "was killed", "timeout": "ran out of time", "absent": "was not installed"}.get(status, "failed")


def _name(row: Row) -> str:
    return _USUAL.get(row.method, row.method)


def _is_ours(row: Row) -> bool:
    return row.method.startswith("sluice")
