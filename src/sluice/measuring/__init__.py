"""Measure and limit the memory of a process: host memory by kind, control groups and accelerators.

In: a block of code, a function or a command, and a limit. Out: a ``MemoryReport`` or a ``LimitedRun``. Independent of
the rest of sluice's API.

Entry functions: ``measure``, ``run_limited`` and ``limited_group``.
"""

from __future__ import annotations

from sluice.measuring._limit import LimitedGroup, LimitedRun, limited_group, memory_limit_refusal, run_limited
from sluice.measuring._meter import Measurement, measure
from sluice.measuring._report import CgroupReport, DeviceReport, Mark, MemoryReport, Timeline

__all__ = [
    "CgroupReport",
    "DeviceReport",
    "LimitedGroup",
    "LimitedRun",
    "Mark",
    "Measurement",
    "MemoryReport",
    "Timeline",
    "limited_group",
    "measure",
    "memory_limit_refusal",
    "run_limited",
]
