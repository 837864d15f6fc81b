"""Further tables of ``bench.gpu``: raw limits, the puzzle, and goals against figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench._puzzle import Puzzle
from sluice._units import format_bytes
from sluice.benchmark.records import MethodRun, Outcome, State
from sluice.benchmark.summary import Row
from sluice.benchmark.table import TableSection

__all__ = ["Figures", "Goal", "goals_section", "judge", "limits_section", "puzzle_section"]

MIB = 1 << 20

#: Bounds: reserved device memory in addition to the weights, and growth of host memory.
_EXTRA_RESERVED_BYTES = 40 * MIB
_HOST_GROWTH_BYTES = 150 * MIB

#: Fractions of the raw speeds to reach.
_OF_PINNED_COPY, _OF_RAW_READ = 0.8, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One goal and whether it was reached."""

    #: Its name.
    name: str
    #: The bound.
    bound: str
    #: The figure.
    found: str
    #: Whether the figure is within the bound; None if either was not measured.
    reached: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one scenario."""

    #: Its title.
    title: str
    #: F, in bytes.
    final_bytes: int
    #: Its rows.
    rows: Sequence[Row]
    #: Peak growth of the whole device's memory by method, contexts included, in bytes.
    device_growth_bytes: Mapping[str, int]


def judge(
    figures: Sequence[Figures],
    *,
    pinned_copy_seconds: float | None,
    raw_read_seconds: float | None,
    puzzle: Puzzle | None = None,
    solved: Outcome | None = None,
) -> list[Goal]:
    """Return all goals.

    Args:
        figures: Figures of each scenario, all from files of the same size.
        pinned_copy_seconds: Time of a copy of the file's bytes from page-locked memory to the device.
        raw_read_seconds: Time of the fastest cold read of the file into host memory.
        puzzle: Size of the puzzle; None if it was not tried.
        solved: Outcome of the puzzle.
    """
    goals: list[Goal] = []
    for one in figures:
        ours = next((row for row in one.rows if row.method.startswith("sluice")), None)
        if ours is None:
            continue
        goals += _memory_goals(one.title, ours.device_reserved_bytes, one.final_bytes, ours.total_bytes)
        if ours.method == "sluice-load-into":  # the tutorial's strategies are timed with the model's construction
            goals.append(_speed_goal(one, ours, "warm", pinned_copy_seconds, _OF_PINNED_COPY, "pinned copy"))
            goals.append(_speed_goal(one, ours, "cold", raw_read_seconds, _OF_RAW_READ, "raw read"))
        goals += _peer_goals(one, ours)
    if puzzle is not None and solved is not None and solved.status == "ok":
        facts = solved.facts
        goals += _memory_goals("the puzzle", facts["device_reserved_bytes"], puzzle.final_bytes, solved.total_bytes)
        right = facts["wrong_matrices"] == 0 and facts["computes"]
        found = "all right" if right else f"{facts['wrong_matrices']} wrong matrices"
        goals.append(Goal(name="the puzzle: every weight", bound="all right", found=found, reached=right))
    return goals


def _memory_goals(title: str, reserved_bytes: int, final_bytes: int, host_bytes: int) -> Iterator[Goal]:
    measured = reserved_bytes > 0
    extra = reserved_bytes - final_bytes
    yield Goal(
        name=f"{title}: reserved on the device",
        bound=f"F + {format_bytes(_EXTRA_RESERVED_BYTES)}",
        found=f"F {'-' if extra < 0 else '+'} {format_bytes(abs(extra))}" if measured else "not measured",
        reached=extra <= _EXTRA_RESERVED_BYTES if measured else None,
    )
    yield Goal(
        name=f"{title}: growth of the host",
        bound=format_bytes(_HOST_GROWTH_BYTES),
        found=format_bytes(host_bytes) if measured else "not measured",
        reached=host_bytes <= _HOST_GROWTH_BYTES if measured else None,
    )


def _speed_goal(figures: Figures, ours: Row, state: State, raw: float | None, share: float, of: str) -> Goal:
    found = ours.seconds.get(state)
    bound = None if raw is None else raw / share
    return Goal(
        name=f"{figures.title}: {state}",
        bound=f"{share:g} of the {of}" + ("" if bound is None else f": {bound:.2f} s"),
        found="not measured" if found is None else f"{found:.2f} s",
        reached=None if found is None or bound is None else found <= bound,
    )


def _peer_goals(figures: Figures, ours: Row) -> Iterator[Goal]:
    """Yield a goal for each other method that finished: less time in every state, and at most as much memory."""
    for row in figures.rows:
        if row.method == ours.method or row.over_final is None or not row.seconds:
            continue
        both = [state for state in row.seconds if state in ours.seconds]
        theirs_bytes, ours_bytes = _all_memory(figures, row), _all_memory(figures, ours)
        faster = all(ours.seconds[state] < row.seconds[state] for state in both)
        yield Goal(
            name=f"{figures.title}: ahead of {row.method}",
            bound=_time_and_memory(row, both, theirs_bytes),
            found=_time_and_memory(ours, both, ours_bytes),
            reached=faster and ours_bytes <= theirs_bytes if both else None,
        )


def _all_memory(figures: Figures, row: Row) -> int:
    return row.total_bytes + figures.device_growth_bytes.get(row.method, row.device_reserved_bytes)


def _time_and_memory(row: Row, states: Sequence[State], nbytes: int) -> str:
    return ", ".join([*(f"{state} {row.seconds[state]:.2f} s" for state in states), format_bytes(nbytes)])


def limits_section(file_bytes: int, pinned: Outcome, runs: Sequence[MethodRun]) -> TableSection:
    """Return the raw limits of the machine for the bytes of the file."""
    outcomes = {"copy from page-locked memory": pinned}
    outcomes |= {f"{run.method}, {run.state}": run.outcome for run in runs if run.method.startswith("raw-")}
    rows = []
    for name, outcome in outcomes.items():
        # The copy is repeated in one process, which returns the fastest.
        seconds = outcome.facts.get("seconds", outcome.seconds)
        good = outcome.status == "ok" and seconds
        speed = f"{file_bytes / seconds / 1e9:.2f}" if good else "-"
        rows.append((name, f"{seconds:.3f}" if good else outcome.reason, speed))
    title = f"Raw limits: the {format_bytes(file_bytes)} of the fp32 file"
    return TableSection(title=title, headings=("what", "seconds", "GB/s"), rows=tuple(rows))


def puzzle_section(puzzle: Puzzle | None, solved: Outcome | None, reason: str) -> TableSection:
    """Return the result of the puzzle; ``reason`` is why it was not tried."""
    rows = []
    if puzzle is not None:
        rows += [
            ("scale", f"{puzzle.share:.2f} of the full puzzle"),
            ("file, fp32", format_bytes(puzzle.file_bytes)),
            ("model, bf16 (F)", format_bytes(puzzle.final_bytes)),
            ("cap of the device", format_bytes(puzzle.device_limit_bytes)),
        ]
    if solved is None or solved.status != "ok":
        rows.append(("result", reason if solved is None else solved.reason))
    else:
        facts = solved.facts
        rows += [
            ("reserved on the device", format_bytes(facts["device_reserved_bytes"])),
            ("allocated on the device", format_bytes(facts["device_allocated_bytes"])),
            ("growth of the host", format_bytes(solved.total_bytes)),
            ("seconds, cold", f"{solved.seconds:.1f}"),
            ("GB/s", f"{facts['read_bytes'] / solved.seconds / 1e9:.2f}"),
            ("wrong matrices", str(facts["wrong_matrices"])),
            ("computes", "yes" if facts["computes"] else "NO"),
        ]
    return TableSection(title="The puzzle of pytorch issue 75242", headings=("what", "figure"), rows=tuple(rows))


def goals_section(goals: Sequence[Goal]) -> TableSection:
    """Return a table of goals and figures."""
    words = {True: "reached", False: "missed", None: "not measured"}
    rows = tuple((goal.name, goal.bound, goal.found, words[goal.reached]) for goal in goals)
    return TableSection(title="Goals", headings=("goal", "bound", "measured", "verdict"), rows=rows)
