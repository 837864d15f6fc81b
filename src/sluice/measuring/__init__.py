"""Memory of the host and of accelerators, measured from outside and limited. Usable without anything else of sluice."""

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
