"""Helpers for tests of code that builds on sluice.

A memory assertion, and programs under a hard memory limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sluice._public import public
from sluice._units import format_bytes
from sluice.machine.processes import PeakMeter
from sluice.measuring import memory_limit_refusal, run_limited

__all__ = ["assert_peak", "memory_limit_refusal", "run_limited"]


@public("sluice.testing")
@contextmanager
def assert_peak(limit_bytes: int) -> Iterator[PeakMeter]:
    """Fail if the resident memory of this process, all kinds together, grows by more than ``limit_bytes`` in the block.

    The peak is the kernel's own record (``VmHWM``), so that no short peak is missed. Memory of other threads counts.

    Raises:
        AssertionError: Memory grew by more.

    Example:
        >>> with assert_peak(64 << 20):
        ...     data = bytes(1 << 20)
    """
    with PeakMeter() as meter:
        meter.sample()
        yield meter
    grown = meter.peaks.total_bytes
    if grown > limit_bytes:
        raise AssertionError(f"memory grew by {format_bytes(grown)}, more than the {format_bytes(limit_bytes)} allowed")
