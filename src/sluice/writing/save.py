"""Save an object in memory, by this process or by all ranks that hold parts of it."""

from __future__ import annotations

import sys

from sluice.writing.formats import write_contents
from sluice.writing.held_object import HeldObject
from sluice.writing.save_formats import SaveFormat
from sluice.writing.save_job import SavedFiles, SaveJob

__all__ = ["save_state"]


def save_state(state: object, save_format: SaveFormat, job: SaveJob) -> SavedFiles:
    """Write a state dict or a nested training state, and its manifest; by all ranks together if it has DTensors.

    Raises:
        SaveError: The format cannot hold the object, or the operating system failed.
    """
    if save_format == "dcp" or "torch.distributed.tensor" in sys.modules:  # otherwise there is no DTensor
        from sluice.writing.ranks.held import dtensors_in
        from sluice.writing.ranks.save import save_by_ranks

        if save_format == "dcp" or dtensors_in(state):
            return save_by_ranks(state, save_format, job)
    return write_contents(HeldObject(state, job.dtype), save_format, job)
