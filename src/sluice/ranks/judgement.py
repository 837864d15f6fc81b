"""Records of the steps that ranks take together, and what is compared before any of them reads.

The functions are pure: from the proposals of all ranks to their failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Literal

from msgspec import Struct

from sluice._units import format_bytes

__all__ = ["Judge", "Proposal", "State", "StepOutcome", "judge_proposals"]

#: State of the model on a rank: as before, filled in part, or filled.
State = Literal["untouched", "torn", "changed"]


class StepOutcome(Struct, frozen=True, kw_only=True):
    """The result of one step, the same on every rank."""

    #: Failures that end the call on every rank, by rank; empty if the step succeeded.
    failed: dict[int, str] = {}
    #: Decision of the judge; empty after a failure.
    value: bytes = b""
    #: After a failure: the tensors of each rank that is known to be at this step, as in ``StoreGroup.decide``.
    states: dict[int, State] = {}


#: Pure function from the contribution of each rank to the outcome; called on one rank, if no rank failed.
Judge = Callable[[Mapping[int, bytes]], StepOutcome]


class Proposal(Struct, frozen=True, kw_only=True):
    """Description of the load of one rank."""

    #: Identity of its host: ranks with the same one share memory.
    host: str
    #: Name of the host, for messages.
    hostname: str
    #: Path, size in bytes and version of each file; paths may differ, because hosts mount them at different places.
    #: Only remote objects have a version.
    files: tuple[tuple[str, int, str], ...]
    #: Digest of the contents of the checkpoint: names, dtypes, shapes and places of all tensors.
    index: str
    #: Digest of samples of the files.
    contents: str
    #: Arguments that must be equal on all ranks, as text by name.
    arguments: Mapping[str, str]
    #: Ranks of each device mesh over which this rank's tensors are divided: ranks that none connects hold different
    #: models, such as the stages of a pipeline.
    meshes: tuple[tuple[int, ...], ...] = ()
    #: Digest of the names of the model and of the tensors of the checkpoint that fill them.
    requested: str
    #: Predicted growth of host memory, in bytes.
    growth_bytes: int
    #: Limit on the growth of host memory that this rank knows, in bytes; it counts all ranks of the host.
    limit_bytes: int
    #: Origin of the limit.
    limit_origin: str


def judge_proposals(proposals: Mapping[int, Proposal]) -> dict[int, str]:
    """Return the failures by rank: ranks that differ from the first one, or ranks of hosts with too little memory.

    Args:
        proposals: The proposal of each rank.
    """
    found: dict[int, str] = {}
    for members in _models_of(proposals):
        for rank in members[1:]:
            problem = _difference(proposals[rank], proposals[members[0]], members[0])
            if problem:
                found[rank] = problem
    return found or _shortages(proposals)


def _models_of(proposals: Mapping[int, Proposal]) -> list[list[int]]:
    """Return the ranks that hold each model: those that meshes connect."""
    groups: list[set[int]] = [{rank} for rank in proposals]
    for rank, proposal in proposals.items():
        for mesh in proposal.meshes or (tuple(proposals),):
            touching = [group for group in groups if not group.isdisjoint({rank, *mesh})]
            groups = [group for group in groups if group not in touching] + [set().union(*touching)]
    return sorted(sorted(group) for group in groups)


def _difference(own: Proposal, other: Proposal, rank: int) -> str:
    """Return what distinguishes a proposal from that of a different rank; empty if nothing does."""
    for name, value in own.arguments.items():
        if other.arguments.get(name) != value:
            return f"was called with {name}={value}, rank {rank} with {name}={other.arguments.get(name)}"
    if len(own.files) != len(other.files):
        return f"has a checkpoint of {len(own.files)} files, rank {rank} one of {len(other.files)}"
    for (path, nbytes, version), (other_path, other_bytes, other_version) in zip(own.files, other.files, strict=True):
        if nbytes != other_bytes:
            return f"has {path} with {nbytes} bytes, rank {rank} {other_path} with {other_bytes} bytes"
        if path == other_path and version != other_version:
            return f"has version {version} of {path}, rank {rank} version {other_version}"
    if own.index != other.index:
        return f"has a checkpoint of the same size as rank {rank} with different headers"
    if own.contents != other.contents:
        return f"has a different version of the files than rank {rank}: sizes and headers are equal, the data is not"
    if own.requested != other.requested:
        return f"has a model with other names, shapes or dtypes than rank {rank}, or maps other tensors to them"
    return ""


def _shortages(proposals: Mapping[int, Proposal]) -> dict[int, str]:
    """Return a failure for each rank of a host whose ranks together need more than the smallest of their limits."""
    found: dict[int, str] = {}
    ranks = sorted(proposals, key=lambda rank: (proposals[rank].host, rank))
    for _, members in groupby(ranks, lambda rank: proposals[rank].host):
        own = {rank: proposals[rank] for rank in members}
        growth = sum(proposal.growth_bytes for proposal in own.values())
        tightest = min(own.values(), key=lambda proposal: proposal.limit_bytes)
        if growth > tightest.limit_bytes:
            listed = ", ".join(map(str, own))
            text = (
                f"the ranks {listed} of host {tightest.hostname} together need {format_bytes(growth)} of host memory; "
                f"expected at most {format_bytes(tightest.limit_bytes)} ({tightest.limit_origin})"
            )
            found |= dict.fromkeys(own, text)
    return found
