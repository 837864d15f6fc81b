"""Transfers between ranks through process groups of torch.distributed.

Each transfer is an asynchronous collective that this process asks whether it is complete: waiting can then notice that
a rank was lost, which the collective itself notices after the timeout of the group, half an hour by default. A transfer
that is given up leaves the group unusable, as does the rank that was lost. Its memory stays allocated, because the
group may still write to it.

A group that has no backend for host memory (NCCL alone) gets the bytes through a tensor on the accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sluice import _defaults as defaults
from sluice._errors import ReadError
from sluice.ranks.agreement import OtherRankError, describe
from sluice.ranks.protocol import Group, Ruling

__all__ = ["GroupTransport"]

#: Seconds between two questions whether a transfer is complete: the first and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.00005, 0.002

#: Memory that abandoned transfers may still write to.
_ABANDONED: list[object] = []


class GroupTransport:
    """Transfers of one load; see ``engine.rounds.Transport``."""

    def __init__(
        self, group: Group, process_groups: Mapping[tuple[int, ...], Any], used: Sequence[tuple[int, ...]]
    ) -> None:
        """Transfer nothing yet.

        Args:
            group: The ranks of the load.
            process_groups: The process groups to which this rank belongs, by their ranks.
            used: Ranks of each group that the rounds use.
        """
        self.rank = group.rank
        self._group = group
        self._all = process_groups[group.ranks]
        self._groups = [process_groups.get(ranks) for ranks in used]

    def begin(self, error: BaseException | None) -> None:
        """See ``Transport.begin``."""
        if error is not None and not isinstance(error, OtherRankError):
            self._group.warn(describe(error))
        verdict = self._group.decide("own reads", b"", _accept)
        if error is not None:
            raise error
        if verdict.failed or self._group.interrupted:
            raise KeyboardInterrupt if self._group.interrupted else self.other_failed()

    def all_well(self, *, well: bool) -> bool:
        """See ``Transport.all_well``."""
        import torch.distributed as dist

        word = torch.tensor([int(well)], dtype=torch.int32, device=_device(self._all))
        self._complete(lambda: dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self._all, async_op=True), word)
        return bool(word.item())

    def broadcast(self, memory: memoryview, owner: int, group: int) -> None:
        """See ``Transport.broadcast``."""
        import torch.distributed as dist

        process_group = self._groups[group]
        host = torch.frombuffer(memory, dtype=torch.uint8)
        device = _device(process_group)
        sent = host if device == "cpu" else host.to(device)
        self._complete(lambda: dist.broadcast(sent, src=owner, group=process_group, async_op=True), (sent, memory))
        if sent is not host and owner != self.rank:
            host.copy_(sent)

    def other_failed(self) -> Exception:
        """See ``Transport.other_failed``."""
        return OtherRankError("a different rank has failed")

    def _complete(self, start: Callable[[], Any], held: object) -> None:
        """Start a collective and return when it is complete."""
        try:
            work = start()
            pause = _FIRST_PAUSE
            while not work.is_completed():
                if self._group.look():
                    _ABANDONED.append((work, held))
                    raise self.other_failed()
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE)
            work.wait()
        except RuntimeError as error:  # of the backend: the connection to another rank was closed
            if self._lost_a_rank():
                raise self.other_failed() from error
            raise ReadError(f"the process group failed to transfer data: {error}") from error

    def _lost_a_rank(self) -> bool:
        """Return whether a different rank has failed; the connections of a process close a little before it is gone."""
        until = time.monotonic() + defaults.RANK_FAREWELL_SECONDS
        while not self._group.look(now=True):
            if time.monotonic() > until:
                return False
            time.sleep(_LONGEST_PAUSE)
        return True


def _accept(_: Mapping[int, bytes]) -> Ruling:
    return Ruling()


def _device(process_group: Any) -> str:
    """Return the device of the tensors that a group transfers: the host if it can."""
    import torch.distributed as dist

    names = dist.get_backend_config(process_group)
    if "cpu:" in names or names in {"gloo", "mpi"}:
        return "cpu"
    return str(torch.accelerator.current_accelerator())
