"""Memory of the host and of accelerators, measured from outside. Usable without anything else of sluice."""

from __future__ import annotations

from sluice.measuring._meter import Measurement, measure
from sluice.measuring._report import CgroupReport, DeviceReport, Mark, MemoryReport, Timeline

__all__ = ["CgroupReport", "DeviceReport", "Mark", "Measurement", "MemoryReport", "Timeline", "measure"]
