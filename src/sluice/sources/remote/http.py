"""Objects of HTTP servers: single requests for ranges, each answer held against the object that was opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from http import HTTPStatus

import urllib3

from sluice import _defaults as defaults
from sluice._errors import RemoteError, UnsupportedError
from sluice.sources.protocol import Source
from sluice.sources.remote.directory import RemoteDirectory
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.http_addresses import (
    HttpAddress,
    Network,
    is_signed,
    next_address,
    parse_address,
    resolved_network,
)
from sluice.sources.remote.http_connections import Lease, shared_connections
from sluice.sources.remote.http_pools import HttpBody, discard
from sluice.sources.remote.http_responses import TEMPORARY, ResponseHead, check_range, conditions, first_facts
from sluice.sources.remote.location import Remote
from sluice.sources.remote.protocol import Body, ObjectFacts, RequestFailedError

__all__ = ["HttpObject", "open_directory", "open_source"]

#: Statuses of redirects.
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

#: Statuses of errors that are about the object, not about the address.
_ABOUT_OBJECT = frozenset({HTTPStatus.PRECONDITION_FAILED, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE})


def open_source(remote: Remote) -> Source:
    """Return the object of an ``http`` or ``https`` URL as a source.

    Raises:
        SluiceError: The URL or a header is not valid, there is no such object, or its server does not answer ranges.
    """
    return RemoteFile(HttpObject(remote))


def open_directory(remote: Remote) -> RemoteDirectory | None:  # noqa: ARG001  (of all kinds)
    """Return None: HTTP has no directories."""
    return None


class HttpObject:
    """An object of an HTTP server; see ``RemoteObject``.

    Redirects are followed once, and their target is remembered until it refuses a request: signatures in it expire.
    Credentials and additional headers are sent only to the origin of the first address.
    """

    def __init__(self, where: str | Remote, *, shown: str | None = None) -> None:
        """Request nothing yet.

        Args:
            where: Address.
            shown: Address for messages; None for the URL without credentials.

        Raises:
            RemoteError: The URL or a header is not valid.
            UnsupportedError: There are options, which have no effect.
        """
        remote = where if isinstance(where, Remote) else Remote(where)
        self.path = remote.address if shown is None else shown
        if remote.options:
            problem = "options= has no effect on http and hf: it is for object stores and fsspec"
            raise UnsupportedError(problem, file=self.path, advice="Use headers=, verify=, cert= or timeout=.")
        self._first, authorization = parse_address(remote.url)
        self._target = self._first
        self._first_network: Network | None = None
        self._headers = _own_headers(remote.headers or {}, authorization, self.path)
        self._tls = (remote.verify, (remote.cert, None) if isinstance(remote.cert, str) else remote.cert)
        self._timeout = remote.timeout or defaults.REMOTE_TIMEOUT_SECONDS
        self._connections = shared_connections(self._tls)
        self._lease: Lease | None = self._connections.lease()

    def open_first(self, nbytes: int) -> tuple[ObjectFacts, AbstractContextManager[Body]]:
        response, address = self._answer({"Range": f"bytes=0-{nbytes - 1}"})
        try:
            facts = first_facts(self._described(response, address), nbytes)
        except BaseException:
            discard(response)
            raise
        return facts, HttpBody(response, min(nbytes, facts.nbytes), failed=self._forget_target)

    def open_range(self, offset: int, nbytes: int, facts: ObjectFacts) -> AbstractContextManager[Body]:
        wanted = {"Range": f"bytes={offset}-{offset + nbytes - 1}"}
        response, address = self._answer(wanted | conditions(facts))
        try:
            check_range(self._described(response, address), offset, nbytes, facts)
        except BaseException:
            discard(response)
            raise
        return HttpBody(response, nbytes, failed=self._forget_target)

    def document(self, most_bytes: int) -> tuple[ResponseHead, bytes]:
        """Request the whole object, such as the answer of an API; return its head, and at most ``most_bytes`` bytes."""
        response, address = self._answer({})
        answer, data = self._described(response, address), bytearray(most_bytes)
        done = 0
        with HttpBody(response, most_bytes + 1) as body, memoryview(data) as view:
            while done < most_bytes and (found := body.readinto(view[done:])):
                done += found
        length = answer.headers.get("Content-Length", "")
        if length.isdigit() and done != min(int(length), most_bytes):
            raise RequestFailedError("the answer ended too early", temporary=True)
        return answer, bytes(data[:done])

    def move_to(self, url: str) -> None:
        """Send all further requests to another address of the same object."""
        self._first = self._target = parse_address(url)[0]

    def close(self) -> None:
        self._lease = None

    def _described(self, response: urllib3.BaseHTTPResponse, address: HttpAddress) -> ResponseHead:
        query = address.target.partition("?")[2]
        return ResponseHead(status=response.status, headers=response.headers, path=self.path, signed=is_signed(query))

    def _answer(self, wanted: Mapping[str, str]) -> tuple[urllib3.BaseHTTPResponse, HttpAddress]:
        """Request something, follow redirects, and return the answer and the address that gave it."""
        target = self._target
        if target != self._first:
            try:
                response = self._get(target, wanted)
            except RequestFailedError:
                self._forget_target()
                raise
            if not _is_expired(response.status):
                return response, target
            discard(response)
        return self._resolved(wanted)

    def _forget_target(self) -> None:
        """Ask the first address again: it may know a better target."""
        self._target = self._first

    def _resolved(self, wanted: Mapping[str, str]) -> tuple[urllib3.BaseHTTPResponse, HttpAddress]:
        address = self._first
        for _ in range(defaults.REMOTE_REDIRECTS + 1):
            response = self._get(address, wanted)
            if response.status not in _REDIRECTS:
                self._target = address
                return response, address
            location = response.headers.get("Location")
            discard(response)
            address = next_address(address, location)
        raise RequestFailedError(f"the server redirects more than {defaults.REMOTE_REDIRECTS} times", temporary=False)

    def _get(self, address: HttpAddress, wanted: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        own = address.origin == self._first.origin
        if self._lease is None or self._connections.pid != os.getpid():  # closed, or forked, and read again
            self._connections = shared_connections(self._tls)
            self._lease = self._connections.lease()
        return self._connections.get(
            address,
            {**(self._headers if own else _USER_AGENT), "Accept-Encoding": "identity", **wanted},
            timeout=self._timeout,
            first=None if own else self._began_in(),
            path=self.path,
        )

    def _began_in(self) -> Network:
        """Return the network of the first address, which decides where redirects may lead."""
        if self._first_network is None:
            self._first_network = resolved_network(self._first.host)
        return self._first_network


def _is_expired(status: int) -> bool:
    """Return whether the target of a redirect may no longer be valid: stores answer expired signatures differently."""
    return status in _REDIRECTS or (400 <= status < 500 and status not in _ABOUT_OBJECT | TEMPORARY)


_USER_AGENT = {"User-Agent": "sluice"}

#: Headers that this module sends itself.
_OURS = frozenset({"range", "accept-encoding", "if-match", "if-range", "if-unmodified-since", "host", "connection"})


def _own_headers(headers: Mapping[str, str], authorization: str | None, path: str) -> dict[str, str]:
    """Return the additional headers of requests to the first origin."""
    own = _USER_AGENT if authorization is None else {**_USER_AGENT, "Authorization": authorization}
    for name, value in headers.items():
        legal = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if not legal or not value.isprintable() or not value.isascii():
            # The value is not shown: it may be a password or a token.
            advice = "A header is a name and a value of printable ASCII characters."
            raise RemoteError("a header is not valid", file=path, found=f"header {name!r}", advice=advice)
        if name.lower() not in _OURS:
            own = {each: text for each, text in own.items() if each.lower() != name.lower()} | {name: value}
    return own
