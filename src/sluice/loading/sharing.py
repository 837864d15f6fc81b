"""Let ranks read for each other: whether, and who reads what."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from sluice._units import counted, format_bytes
from sluice.loading.job import LoadJob, LoadRequest, with_reason
from sluice.planning.sharing import Needs, Schedule, divide, needs_of, schedule
from sluice.ranks.agreement import Agreement
from sluice.ranks.protocol import Ruling
from sluice.ranks.transport import GroupTransport

__all__ = ["share_reads"]


def share_reads(job: LoadJob, request: LoadRequest, agreement: Agreement) -> LoadJob:
    """Return a job in which the ranks read for each other what several of them need.

    Raises:
        RankError: A rank failed.
    """
    groups = request.process_groups()
    rank = agreement.group.rank
    needs = agreement.attempt(lambda: needs_of(job.plan, tuple(sorted(groups))))
    found = agreement.settle("share", msgspec.json.encode(needs), _judge)
    rounds = msgspec.json.decode(found, type=Schedule)
    if agreement.group.ranks not in groups:
        reason = "each rank reads for itself, because no process group has exactly the ranks of the model"
        return with_reason(job, reason)
    nbytes = sum(stop - start for _, start, stop, *_ in rounds.rounds)
    own = sum(stop - start for _, start, stop, owner, *_ in rounds.rounds if owner == rank)
    reason = (
        f"{format_bytes(nbytes)} that several ranks need are read once, in {counted(len(rounds.rounds), 'round')}, "
        f"{format_bytes(own)} of them by this rank"
    )
    if not rounds.rounds:
        return with_reason(job, reason)
    transport = GroupTransport(agreement.group, groups, rounds.groups)
    return with_reason(
        replace(job, prepared=replace(job.prepared, plan=divide(job.plan, rounds, rank)), transport=transport), reason
    )


def _judge(answers: Mapping[int, bytes]) -> Ruling:
    needs = {rank: msgspec.json.decode(answer, type=Needs) for rank, answer in answers.items()}
    return Ruling(value=msgspec.json.encode(schedule(needs)))
