"""Run one plan in a session of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from sluice.engine.running_plan import RunResult, TargetMemory
from sluice.engine.session import Session
from sluice.records import LoadPlan
from sluice.sources.protocol import Source


def execute(
    plan: LoadPlan,
    sources: Sequence[Source],
    targets: TargetMemory,
    *,
    progress: Callable[[int], None] | None = None,
    completed: Callable[[int], None] | None = None,
) -> RunResult:
    with closing(Session(sources)) as session:
        return session.start(plan, targets).wait(progress=progress, completed=completed)
