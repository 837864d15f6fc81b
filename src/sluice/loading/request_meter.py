"""The requests of a load for remote files, planned and made."""

from __future__ import annotations

from dataclasses import replace

from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.records import LoadPlan, RemoteReads

__all__ = ["made_requests", "planned_requests"]


def planned_requests(checkpoint: OpenCheckpoint, plan: LoadPlan) -> RemoteReads | None:
    """Return the figures of a plan before it is run, when headers have been read; None if no file is remote."""
    found = [source.traffic for source in checkpoint.sources if hasattr(source, "traffic")]
    if not found:
        return None
    planned = plan.traffic()
    return RemoteReads(
        header_requests=sum(each.requests for each in found),
        header_bytes=sum(each.nbytes for each in found),
        planned_requests=planned.requests,
        planned_bytes=planned.nbytes,
    )


def made_requests(checkpoint: OpenCheckpoint, plan: LoadPlan, planned: RemoteReads | None) -> RemoteReads | None:
    """Return the figures after the plan was run, from those before."""
    now = planned_requests(checkpoint, plan)
    if planned is None or now is None:
        return None
    requests, nbytes = now.header_requests - planned.header_requests, now.header_bytes - planned.header_bytes
    return replace(planned, requests=requests, received_bytes=nbytes)
