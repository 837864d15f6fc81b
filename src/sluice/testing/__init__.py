"""Helpers for tests of code that builds on sluice.

A memory assertion, and programs under a hard memory limit.
"""

from __future__ import annotations

from sluice.measuring import memory_limit_refusal, run_limited
from sluice.testing._peak import assert_peak

__all__ = [
    "assert_peak",
    "memory_limit_refusal",
    "run_limited",
]
