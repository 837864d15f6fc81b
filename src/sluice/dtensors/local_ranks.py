"""The number of ranks on this host, without communication."""

from __future__ import annotations

import os
import sys

__all__ = ["local_rank_count"]

#: Variables in which torchrun, Open MPI and Slurm give the number of processes that they started on this host.
_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def local_rank_count() -> int:
    """Return how many ranks of the default process group are on this host; 1 without a group.

    If no launcher says it, all of them: too little staging is slow, too much does not fit.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 1
    ranks: int = dist.get_world_size()
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return min(int(value), ranks)
    return ranks
