"""Requests for remote files and the bytes that they bring: what servers bill for a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sluice._public import public
from sluice._units import counted, format_bytes

__all__ = ["RemoteReads", "RequestRecord", "Traffic"]


class Traffic(NamedTuple):
    """Requests, and the bytes of their bodies."""

    #: Number of requests, including those that failed.
    requests: int = 0
    #: Bytes that were received.
    nbytes: int = 0


class RequestRecord(NamedTuple):
    """One request for an object, after its end; what ``on_request=`` of ``sluice.Remote`` receives."""

    #: Method of HTTP.
    method: str
    #: Address of the object as the user wrote it, without credentials and query.
    url: str
    #: Bytes of the body that were received.
    nbytes: int
    #: Seconds from the request to the end of the body, with those in which the caller did not read.
    seconds: float
    #: Status of the answer; None if there was none, or if the library that makes the requests does not tell.
    status: int | None


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReads:
    """Requests of a load for remote files, and the bytes that they bring. Listings of directories do not count.

    A load makes fewer requests than planned where the request for a header has brought tensors too, and more if
    requests failed and were repeated.
    """

    #: Requests from the opening of the files to the plan: for headers, and those that an open checkpoint made before.
    header_requests: int
    #: Bytes that they brought.
    header_bytes: int
    #: Requests that the plan makes for tensor data.
    planned_requests: int
    #: Bytes that it requests: tensor data, and gaps between ranges that are read together.
    planned_bytes: int
    #: Requests that were made for tensor data; None without a load.
    requests: int | None = None
    #: Bytes that they brought; None without a load.
    received_bytes: int | None = None

    def describe(self) -> str:
        """Return the figures as one line."""
        headers = f"{counted(self.header_requests, 'request')} for headers, {format_bytes(self.header_bytes)}"
        planned = f"{counted(self.planned_requests, 'request')} for tensors, {format_bytes(self.planned_bytes)}"
        if self.requests is None or self.received_bytes is None:
            return f"remote: {headers}; {planned}"
        if (self.requests, self.received_bytes) == (self.planned_requests, self.planned_bytes):
            return f"remote: {headers}; {planned}, as planned"
        made = f"{counted(self.requests, 'request')} for tensors, {format_bytes(self.received_bytes)}"
        planned = f"{self.planned_requests:,} and {format_bytes(self.planned_bytes)} planned"
        return f"remote: {headers}; {made} ({planned})"
