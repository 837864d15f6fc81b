"""Helpers for tests of what is built on sluice: sources that record or fail their reads, and a memory assertion."""

from __future__ import annotations

from sluice.testing._peak import assert_peak
from sluice.testing._recording import FaultySource, RecordedRead, RecordingSource

__all__ = ["FaultySource", "RecordedRead", "RecordingSource", "assert_peak"]
