"""Addresses of HTTP: parts of a URL, credentials, redirects, and networks that are not public. Pure but for one lookup.

A redirect can send a client to any address, also to one that only the client can reach, such as the metadata service of
its cloud. So a redirect to an address that is not public is followed only from the same network; see ``may_lead``.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from contextlib import suppress
from typing import Literal, TypeAlias
from urllib.parse import quote, unquote, urljoin, urlsplit

from msgspec import Struct

from sluice._errors import RemoteError
from sluice.sources.remote.protocol import RequestFailedError
from sluice.sources.remote_names import without_credentials

__all__ = [
    "HttpAddress",
    "Network",
    "is_signed",
    "may_lead",
    "network_of",
    "next_address",
    "parse_address",
    "resolved_network",
]

#: Kind of network of an address; ``reserved`` is link-local, where clouds have their metadata services.
Network: TypeAlias = Literal["public", "private", "loopback", "reserved"]

_PORTS = {"http": 80, "https": 443}

#: Characters that stay as they are in a path or query. ``%`` is one: addresses are encoded by their authors.
_UNCHANGED = "%/:@!$&'()*+,;=-._~?[]"

#: Parameters of signed URLs of S3, Google Cloud Storage, Azure and CloudFront.
_SIGNATURES = ("x-amz-signature=", "x-goog-signature=", "signature=", "sig=")

#: Metadata services of clouds that are not link-local.
_METADATA = frozenset({"fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192"})

#: Networks of IPv6 whose addresses contain one of IPv4 in their last four bytes (RFC 6052).
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")


class HttpAddress(Struct, frozen=True):
    """The address of one object of a server."""

    #: ``http`` or ``https``.
    scheme: str
    #: Name or IP address, without brackets.
    host: str
    #: Port number.
    port: int
    #: Path and query as they are sent.
    target: str

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port: credentials stay with them."""
        return self.scheme, self.host, self.port

    @property
    def url(self) -> str:
        """The URL, with its query; it may hold a signature, so it is never shown."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"


def parse_address(url: str) -> tuple[HttpAddress, str | None]:
    """Return the address of a URL, and the ``Authorization`` header of the user and password in it, if any.

    Raises:
        RemoteError: The URL is not one of HTTP.
    """
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme.lower(), parts.hostname or ""
        port = parts.port if parts.port is not None else _PORTS[scheme]
        host = host if host.isascii() else host.encode("idna").decode()
        if not host or any(character <= " " or character == "\x7f" for character in host):
            raise ValueError("no host")
        target = quote(parts.path or "/", safe=_UNCHANGED)
        if parts.query:
            target += "?" + quote(parts.query, safe=_UNCHANGED)
        authorization = None
        if parts.username or parts.password:
            plain = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            authorization = "Basic " + base64.b64encode(plain.encode()).decode()
    except (ValueError, KeyError, UnicodeError):
        # Not raised from the error: its text has the URL.
        advice = "An address has the form https://host/path."
        raise RemoteError("the address is not a URL of HTTP", file=without_credentials(url), advice=advice) from None
    return HttpAddress(scheme, host, port, target), authorization


def next_address(address: HttpAddress, location: str | None) -> HttpAddress:
    """Return where a redirect leads.

    Args:
        address: The address that was asked.
        location: The header ``Location`` of the answer. A user and password in it are ignored.

    Raises:
        RequestFailedError: Nowhere, to something else than HTTP, or from TLS to plain text.
    """
    if not location:
        raise RequestFailedError("the server redirects without an address", temporary=False)
    with suppress(UnicodeError):  # headers arrive as Latin-1, but servers write UTF-8
        location = location.encode("latin-1").decode()
    try:
        following, _ = parse_address(urljoin(address.url, location))
    except (RemoteError, ValueError):
        raise RequestFailedError("the server redirects to what is not a URL of HTTP", temporary=False) from None
    if address.scheme == "https" and following.scheme != "https":
        advice = "The answer could be read and changed on its way. Use the address that the server redirects to."
        raise RequestFailedError("the server redirects from https to http", temporary=False, advice=advice)
    return following


def is_signed(query: str) -> bool:
    """Return whether the query of an address carries a signature, which expires."""
    return any(part.startswith(_SIGNATURES) for part in query.lower().split("&"))


def network_of(host: str) -> Network:
    """Return the network of an IP address. Names are public: they are judged by the addresses to which they resolve."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "loopback" if host.lower() == "localhost" or host.lower().endswith(".localhost") else "public"
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        address = inner or address
    if address.is_global:
        return "public"
    if address.is_loopback or address.is_unspecified:
        return "loopback"
    return "reserved" if address.is_link_local or str(address) in _METADATA else "private"


def resolved_network(host: str) -> Network:
    """Return the network of all addresses of a host: public or private if they differ."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return network_of(host)
    networks = {network_of(str(address[0])) for *_, address in found}
    if len(networks) == 1:
        return networks.pop()
    return "private" if networks == {"private", "loopback"} else "public"


def may_lead(first: Network, target: Network) -> bool:
    """Return whether a redirect may lead from an address in one network to one in another.

    Private addresses redirect to each other. Only the machine itself redirects to itself, and nothing to the metadata
    service of a cloud but that.
    """
    return target in ("public", first) or (target == "private" and first == "loopback")
