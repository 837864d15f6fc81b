"""Requests grow with the latency of the server."""

from __future__ import annotations

import pytest

from sluice.records import AccessFacts
from sluice.sources.remote.tuning import for_latency

MIB = 1 << 20


def access(connections: int, mib: int = 8) -> AccessFacts:
    return AccessFacts(request_bytes=mib * MIB, gap_bytes=MIB, parallel_requests=connections, joins_reads=True)


@pytest.mark.parametrize(
    ("seconds", "connections", "mib"),
    [(0.0, 16, 8), (0.05, 16, 8), (0.2, 16, 16), (0.05, 8, 16), (0.2, 8, 32), (5.0, 16, 32), (0.2, 1, 32)],
)
def test_the_other_connections_last_for_the_latency(seconds: float, connections: int, mib: int) -> None:
    assert for_latency(access(connections), seconds).request_bytes == mib * MIB
