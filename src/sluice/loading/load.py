"""Make a load, alone or together with other ranks."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager

import torch

from sluice._progress import Progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.loading.job import LoadRequest, decide, load_report, run
from sluice.machine.processes import PeakMeter
from sluice.ranks.membership import group_of
from sluice.reports.load import LoadReport

__all__ = ["load"]


def load(request: LoadRequest, opening: AbstractContextManager[OpenCheckpoint], *, progress: Progress) -> LoadReport:
    """Open a checkpoint, decide a load, run it and report it.

    Args:
        request: Arguments of the load.
        opening: Opens the checkpoint, and closes it unless the caller opened it.
        progress: As in ``sluice.load_into``.

    Raises:
        BudgetError: The memory limits cannot be kept; nothing was read.
        RankError: Several ranks load together, and one of them failed.
    """
    started = time.perf_counter()
    # Other libraries import this module: without a process group the tensors of a model need not be looked at.
    divided = "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()
    if divided and (group := group_of(request.tensors())) is not None:
        # Here, not above: most loads are those of one process.
        from sluice.loading.joint import load_together

        return load_together(request, opening, group, progress=progress, started=started)
    with PeakMeter() as meter, opening as checkpoint:
        job = decide(request, checkpoint)
        if job.plan.readers:  # without readers the load takes less time than a thread
            meter.sample()
        loaded = run(job, progress=progress)
    return load_report(job, loaded, seconds=time.perf_counter() - started, measured=meter.peaks)
