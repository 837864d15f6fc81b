"""Sizes of requests that suit the latency of a server."""

from __future__ import annotations

from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._geometry import round_up
from sluice.records import AccessFacts

__all__ = ["for_latency"]


def for_latency(access: AccessFacts, seconds: float) -> AccessFacts:
    """Return access facts with requests that keep a fast line busy in spite of the latency.

    While one of n connections waits for its answer, the others transfer n - 1 requests. They last for the latency if
    each has 1 / (n - 1) of the bytes that the line transfers in that time.

    Args:
        access: The facts for short latencies; requests do not become smaller than theirs.
        seconds: Time to the answer of the opening request. It includes that of a new connection, so that requests may
            become larger than needed.
    """
    step = access.request_bytes
    bytes_per_request = int(seconds * defaults.REMOTE_LINE_BYTES) // max(1, access.parallel_requests - 1)
    return replace(access, request_bytes=min(max(step, round_up(bytes_per_request, step)), defaults.REMOTE_MOST_BYTES))
