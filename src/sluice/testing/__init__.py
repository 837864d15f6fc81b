"""Helpers for tests of code that builds on sluice.

A memory assertion, the reads of an open checkpoint, and programs under a hard memory limit.
"""

from __future__ import annotations

from sluice.measuring import memory_limit_refusal, run_limited
from sluice.testing._peak import assert_peak
from sluice.testing._reads import RecordedRead, RecordingSource, record_reads

__all__ = [
    "RecordedRead",
    "RecordingSource",
    "assert_peak",
    "memory_limit_refusal",
    "record_reads",
    "run_limited",
]
