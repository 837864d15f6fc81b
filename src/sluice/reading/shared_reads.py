"""Run a plan with rounds: first what this rank reads for itself, then what ranks read for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.rounds import Transport, run_rounds
from sluice.engine.running_plan import RunResult
from sluice.engine.targets import Targets
from sluice.reading.reader import CheckpointReader
from sluice.records import LoadPlan, Read

__all__ = ["run_shared"]


def run_shared(
    checkpoint: OpenCheckpoint,
    plan: LoadPlan,
    targets: Targets,
    transport: Transport,
    *,
    progress: Callable[[int], None] | None,
    completed: Callable[[int], None] | None,
) -> RunResult:
    """Run a plan together with other ranks; for the arguments see ``reading.transfer.run``.

    Raises:
        Exception: The failure of this rank, or ``transport.other_failed()``.
    """
    left = _parts_left(plan)

    def part_done(position: int) -> None:
        left[position] -= 1
        if not left[position] and completed:
            completed(position)

    def arrived(read: Read) -> None:
        for position in _targets(read):
            part_done(position)

    result, error = None, None
    try:
        with CheckpointReader(checkpoint) as reader:
            result = reader.run(plan, targets, progress=progress, completed=part_done)
    except BaseException as raised:  # noqa: BLE001  raised by ``begin``, when the other ranks know
        error = raised
    transport.begin(error)
    assert result is not None  # otherwise begin has raised
    own_bytes = plan.read_bytes
    rounds = run_rounds(
        checkpoint.sources,
        plan,
        targets,
        transport,
        progress=None if progress is None else lambda nbytes: progress(own_bytes + nbytes),
        completed=arrived,
    )
    methods: Mapping[str, int] = Counter(result.read_bytes) + Counter(rounds.read_bytes)
    return replace(
        result,
        read_bytes={name: methods.get(name, 0) for name in result.read_bytes},
        received_bytes=rounds.received_bytes,
    )


def _parts_left(plan: LoadPlan) -> Counter[int]:
    """Return how often each target is reported: for its own reads once, and for each read of a round."""
    own = {position for read in plan.reads for position in _targets(read)}
    return Counter(own) + Counter(
        position for each in plan.rounds for read in each.reads for position in _targets(read)
    )


def _targets(read: Read) -> set[int]:
    return {read.into} if read.into is not None else {copy.target for copy in read.copies}
