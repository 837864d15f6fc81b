"""Memory that code of the model takes after a load, when it copies tensors one after the other. Pure; no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice.records import LoadPlan

__all__ = ["growth_of_copies", "with_later_growth"]


def growth_of_copies(copies: Iterable[tuple[int, int]]) -> int:
    """Return the peak growth of host memory while tensors are replaced by copies, in bytes.

    A large tensor frees its memory when its copy is complete. A small one shares an arena with others, which may stay.

    Args:
        copies: Bytes of each tensor and of its copy.
    """
    copies = list(copies)
    freed = [old for old, _ in copies if old >= defaults.OWN_MAPPING_BYTES]
    return sum(new for _, new in copies) - sum(freed) + max(freed, default=0)


def with_later_growth(plan: LoadPlan, later_bytes: int) -> LoadPlan:
    """Return a plan whose prediction includes host memory that is taken when staging is free again, in bytes."""
    more = later_bytes - plan.staging_buffers * plan.staging_buffer_bytes
    if more <= 0:
        return plan
    peaks = plan.predicted
    peaks = dataclasses.replace(peaks, anon_bytes=peaks.anon_bytes + more, total_bytes=peaks.total_bytes + more)
    return replace(plan, predicted=peaks)
