"""Goals on a GPU are compared with their bounds; raw limits are shown as speeds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench._gpu_goals import Figures, Goal, judge, limits_section
from sluice.benchmark.records import MethodRun, Outcome, State
from sluice.benchmark.summary import Row

MIB = 1 << 20
GIB = 1 << 30


def row(method: str, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "method": method,
        "reasons": (),
        "seconds": {"cold": 2.0, "warm": 0.2},
        "cpu_seconds": {},
        "everything_seconds": {},
        "counts": {},
        "failures": {},
        "over_raw": {},
        "anon_bytes": 0,
        "file_bytes": 0,
        "shmem_bytes": 0,
        "total_bytes": 100 * MIB,
        "device_allocated_bytes": GIB,
        "device_reserved_bytes": GIB + 8 * MIB,
        "over_final": 1.0,
        "right": True,
        **changes,
    }
    return Row(**values)


def judged(*rows: Row, growth: dict[str, int] | None = None, **limits: Any) -> dict[str, Goal]:
    figures = Figures(title="T", final_bytes=GIB, rows=rows, device_growth_bytes=growth or {})
    known = {"pinned_copy_seconds": 0.2, "raw_read_seconds": 1.9, **limits}
    return {goal.name: goal for goal in judge([figures], **known)}


@pytest.mark.parametrize(
    ("changes", "goal", "reached"),
    [
        ({"device_reserved_bytes": GIB + 40 * MIB}, "reserved on the device", True),
        ({"device_reserved_bytes": GIB + 40 * MIB + 1}, "reserved on the device", False),
        ({"device_reserved_bytes": 0}, "reserved on the device", None),
        ({"total_bytes": 150 * MIB}, "growth of the host", True),
        ({"total_bytes": 150 * MIB + 1}, "growth of the host", False),
        ({"seconds": {"warm": 0.24}}, "warm", True),
        ({"seconds": {"warm": 0.26}}, "warm", False),
        ({"seconds": {"warm": 0.26}}, "cold", None),
        ({"seconds": {"cold": 2.1}}, "cold", True),
        ({"seconds": {"cold": 2.2}}, "cold", False),
    ],
)
def test_a_goal_is_judged_by_its_bound(changes: dict[str, Any], goal: str, reached: bool | None) -> None:
    assert judged(row("sluice-load-into", **changes))[f"T: {goal}"].reached is reached


def test_goals_without_a_raw_limit_are_not_judged() -> None:
    goals = judged(row("sluice-load-into"), pinned_copy_seconds=None, raw_read_seconds=None)
    assert (goals["T: warm"].reached, goals["T: cold"].reached) == (None, None)


def test_strategies_that_build_the_model_are_not_held_against_raw_limits() -> None:
    assert not {"T: warm", "T: cold"} & judged(row("sluice")).keys()


@pytest.mark.parametrize(
    ("theirs", "growth", "reached"),
    [
        ({"seconds": {"cold": 2.1, "warm": 0.3}}, {}, True),
        ({"seconds": {"cold": 1.9, "warm": 0.3}}, {}, False),
        ({"seconds": {"cold": 2.1, "warm": 0.3}, "total_bytes": 50 * MIB}, {}, False),
        # The device's figure counts, even if torch's allocator did not make the allocation.
        ({"seconds": {"cold": 2.1}, "device_reserved_bytes": 0}, {"peer": 3 * GIB, "sluice-load-into": GIB}, True),
        ({"seconds": {"cold": 2.1}, "device_reserved_bytes": 0}, {"peer": GIB, "sluice-load-into": 3 * GIB}, False),
    ],
)
def test_ahead_of_a_peer_means_in_time_and_in_memory(
    theirs: dict[str, Any], growth: dict[str, int], reached: bool
) -> None:
    goals = judged(row("sluice-load-into"), row("peer", **theirs), growth=growth)
    assert goals["T: ahead of peer"].reached is reached


def test_peers_that_did_not_finish_and_raw_reads_are_not_goals() -> None:
    rows = (row("sluice-load-into"), row("peer", seconds={}), row("raw-direct", over_final=None))
    assert not any("ahead" in name for name in judged(*rows))


def run_of(method: str, state: State, **changes: Any) -> MethodRun:
    outcome = Outcome(status="ok", seconds=2.0)
    return MethodRun(
        scenario="T", method=method, state=state, repetition=0, outcome=dataclasses.replace(outcome, **changes)
    )


def test_raw_limits_are_seconds_and_speeds() -> None:
    runs = [run_of("raw-direct", "cold"), run_of("raw-buffered", "cold", status="failed", reason="no direct I/O")]
    pinned = Outcome(status="ok", seconds=9.0, facts={"seconds": 0.1})
    section = limits_section(4 * 10**9, pinned, [*runs, run_of("naive", "cold")])
    assert section.rows == (
        ("copy from page-locked memory", "0.100", "40.00"),
        ("raw-direct, cold", "2.000", "2.00"),
        ("raw-buffered, cold", "no direct I/O", "-"),
    )
