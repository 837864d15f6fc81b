"""Helpers for tests of code that builds on sluice.

Sources that are in memory, record their reads or fail, the conformance suites of sources and formats, a memory
assertion, and programs under a hard memory limit. Names are imported on first use, so that only
those that hold tensors import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.measuring._limit import memory_limit_refusal, run_limited
    from sluice.testing._conformance import check_source
    from sluice.testing._format_conformance import ExpectedTensor, check_format
    from sluice.testing._peak import assert_peak
    from sluice.testing._sources import FaultySource, MemorySource, RecordedRead, RecordingSource, record_reads

__all__ = [
    "ExpectedTensor",
    "FaultySource",
    "MemorySource",
    "RecordedRead",
    "RecordingSource",
    "assert_peak",
    "check_format",
    "check_source",
    "memory_limit_refusal",
    "record_reads",
    "run_limited",
]

_HOMES = {
    "ExpectedTensor": "testing._format_conformance",
    "assert_peak": "testing._peak",
    "check_format": "testing._format_conformance",
    "check_source": "testing._conformance",
    "memory_limit_refusal": "measuring",
    "run_limited": "measuring",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'sluice.testing' has no attribute {name!r}")
    return getattr(import_module(f"sluice.{_HOMES.get(name, 'testing._sources')}"), name)
