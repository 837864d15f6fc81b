"""State what a comparison found: one headline, and one sentence per table and state of the page cache.

A sentence has seconds and peak of sluice, of the usual way to load, and of the fastest and the leanest of the others if
they did better; and why sluice was the slowest, if it was. All figures are those of the tables, as rounded there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sluice._units import format_bytes
from sluice.benchmark.records import MethodRun, Scenario, State
from sluice.benchmark.summary import Row, summarise

__all__ = ["explain_final_bytes", "finding", "findings", "headline"]

#: The usual way to load, under the names of its methods.
_USUAL = dict.fromkeys(("naive", "torch-load"), "plain torch.load")

#: Explanation of the figures of a method.
_HOW = dict.fromkeys(("mmap", "torch-mmap", "safetensors-load-file"), " (maps the file instead of copying it)")

_STATES: Mapping[State, str] = {"cold": "cold", "warm": "cached"}

_FAILURES = {
    "killed": "was killed",
    "timeout": "ran out of time",
    "absent": "was not installed",
    "skipped": "was not run",
}

#: Why sluice can be the slowest.
_SLOWEST: Mapping[State, str] = {
    "cold": "a load this short is decided by what sluice does once: imports, checks, threads",
    "warm": "no method waits for the disk, and what sluice does once (imports, checks, threads) decides a short load",
}

#: Seconds and peak over F, rounded as in the tables.
_Figures = tuple[float, float]


def headline(subject: str, scenarios: Sequence[Scenario], runs: Sequence[MethodRun]) -> str:
    """Return the finding of the first table in its first state; ``subject`` is what was loaded."""
    return f"{subject}, {finding(scenarios[0], scenarios[0].states[0], runs)}"


def findings(scenarios: Sequence[Scenario], runs: Sequence[MethodRun]) -> Iterator[str]:
    """Yield one sentence per scenario and state."""
    for scenario in scenarios:
        yield from (f"{finding(scenario, state, runs)}." for state in scenario.states)


def explain_final_bytes(scenarios: Sequence[Scenario]) -> str:
    """Return what F is, with its size for each dtype of the comparison."""
    sizes = dict.fromkeys(f"{format_bytes(each.final_bytes)} in {each.short_dtype}" for each in scenarios)
    memory = "GPU memory" if scenarios[0].device != "cpu" else "host memory"
    return (
        f"F is the size of the finished model: {', '.join(sizes)}. Every peak is growth of {memory} during the load: "
        "1.00 F is the model alone, 2.00 F a second copy of it."
    )


def finding(scenario: Scenario, state: State, runs: Sequence[MethodRun]) -> str:
    """Return what one table says about one state, without the final period."""
    limit = "" if scenario.host_limit_bytes is None else f", limit {format_bytes(scenario.host_limit_bytes)}"
    loaders = {row.method: row for row in summarise(scenario, runs) if row.over_final is not None}
    good = {name: figures for name, row in loaders.items() if (figures := _figures(row, state))}
    ours = next((name for name in loaders if name.startswith("sluice")), "")
    usual = next((name for name in _USUAL if name in loaders), "")
    clauses = [_clause(loaders[name], good, state) for name in (ours, usual) if name]
    clauses += _better(good, ours, usual)
    slower = [name for name in good if name != ours and ours in good and good[name][0] >= good[ours][0]]
    if ours in good and len(good) > 2 and not slower:
        clauses.append(f"sluice was the slowest: {_SLOWEST[state]}")
    dead = [
        name
        for name, row in loaders.items()
        if name not in good and row.failures.get(state) not in {"absent", "skipped"}
    ]
    clauses += [f"did not finish: {', '.join(others)}"] if (others := sorted({*dead} - {ours, usual})) else []
    return f"{scenario.short_dtype}, {_STATES[state]}{limit}: {'; '.join(clauses or ['no method finished'])}"


def _clause(row: Row, good: Mapping[str, _Figures], state: State) -> str:
    name = _USUAL.get(row.method, "sluice")
    if row.method in good:
        return f"{name} took {_text(good[row.method])}"
    return f"{name} {'loaded wrong weights' if row.right is False else _FAILURES.get(row.failures[state], 'failed')}"


def _better(good: Mapping[str, _Figures], ours: str, usual: str) -> Iterator[str]:
    """Yield a clause for the fastest and for the leanest of the other methods, where it is better than sluice."""
    others = {name: figures for name, figures in good.items() if name not in {ours, usual} and "sluice" not in name}
    for which, adjective in enumerate(("fastest", "leanest")):
        best = min(others, key=lambda name: (others[name][which], others[name][1 - which]), default=None)
        if best and (ours not in good or others[best][which] < good[ours][which]):
            yield f"the {adjective} other method was {best}{_HOW.get(best, '')}: {_text(others[best])}"


def _figures(row: Row, state: State) -> _Figures | None:
    """Return the figures of a method; None if it did not finish or loaded wrong weights."""
    if state not in row.seconds or row.over_final is None or row.right is False:
        return None
    return round(row.seconds[state], 2), round(row.over_final, 2)


def _text(figures: _Figures) -> str:
    return f"{figures[0]:.2f} s with {figures[1]:.2f} F"
