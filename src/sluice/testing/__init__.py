"""Helpers for tests of what is built on sluice: sources that record or fail their reads."""

from __future__ import annotations

from sluice.testing._recording import FaultySource, RecordedRead, RecordingSource

__all__ = ["FaultySource", "RecordedRead", "RecordingSource"]
