"""The requests of a load for remote files, planned and made."""

from __future__ import annotations

from dataclasses import replace

from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.records import LoadPlan, RemoteReads, Traffic
from sluice.sources.protocol import RemoteSource

__all__ = ["RequestMeter"]


class RequestMeter:
    """The requests for the files of a checkpoint, before and after a plan was run."""

    def __init__(self, checkpoint: OpenCheckpoint, plan: LoadPlan) -> None:
        """Note the requests that were made so far.

        Args:
            checkpoint: The checkpoint, whose headers have been read.
            plan: The plan that will be run.
        """
        # Files of this machine have an inode: the comparison with a protocol takes longer.
        self._sources = [
            each for each in checkpoint.sources if not each.identity.inode and isinstance(each, RemoteSource)
        ]
        if self._sources:
            self._before, self._planned = self._now(), plan.traffic()

    def planned(self) -> RemoteReads | None:
        """Return the figures before the plan is run; None if no file is remote."""
        if not self._sources:
            return None
        return RemoteReads(
            header_requests=self._before.requests,
            header_bytes=self._before.nbytes,
            planned_requests=self._planned.requests,
            planned_bytes=self._planned.nbytes,
        )

    def measured(self) -> RemoteReads | None:
        """Return the figures after the plan was run; None if no file is remote."""
        planned = self.planned() if self._sources else None
        if planned is None:
            return None
        now = self._now()
        return replace(
            planned,
            requests=now.requests - self._before.requests,
            received_bytes=now.nbytes - self._before.nbytes,
        )

    def _now(self) -> Traffic:
        found = [source.traffic for source in self._sources]
        return Traffic(sum(each.requests for each in found), sum(each.nbytes for each in found))
