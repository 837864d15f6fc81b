"""Addresses of HTTP: parts of a URL, credentials, redirects, and networks that are not public. Pure but for one lookup.

A redirect can send a client to any address, also to one that only the client can reach, such as the metadata service of
its cloud. So a redirect to a private address is followed only if the first address was private as well.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from urllib.parse import quote, unquote, urljoin, urlsplit

from msgspec import Struct

from sluice._errors import RemoteError
from sluice.sources.remote.protocol import RequestFailedError
from sluice.sources.remote_names import without_credentials

__all__ = ["HttpAddress", "is_private", "is_signed", "next_address", "parse_address", "resolves_to_private"]

_PORTS = {"http": 80, "https": 443}

#: Characters that stay as they are in a path or query. ``%`` is one: addresses are encoded by their authors.
_UNCHANGED = "%/:@!$&'()*+,;=-._~?[]"

#: Parameters of signed URLs of S3, Google Cloud Storage, Azure and CloudFront.
_SIGNATURES = ("x-amz-signature=", "x-goog-signature=", "signature=", "sig=")

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
    except (ValueError, KeyError, UnicodeError):
        # Not raised from the error: its text has the URL.
        advice = "An address has the form https://host/path."
        raise RemoteError("the address is not a URL of HTTP", file=without_credentials(url), advice=advice) from None
    target = quote(parts.path or "/", safe=_UNCHANGED)
    if parts.query:
        target += "?" + quote(parts.query, safe=_UNCHANGED)
    authorization = None
    if parts.username or parts.password:
        plain = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(plain.encode()).decode()
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
    try:
        following, _ = parse_address(urljoin(address.url, location))
    except (RemoteError, ValueError):
        raise RequestFailedError("the server redirects to what is not a URL of HTTP", temporary=False) from None
    if address.scheme == "https" and following.scheme != "https":
        advice = "The answer could be read and changed on its way. Use the address that the server redirects to."
        raise RequestFailedError("the server redirects from https to http", temporary=False, advice=advice)
    return following


def is_signed(address: HttpAddress) -> bool:
    """Return whether an address carries a signature, which expires."""
    query = address.target.partition("?")[2].lower()
    return any(part.startswith(_SIGNATURES) for part in query.split("&"))


def is_private(host: str) -> bool:
    """Return whether an IP address is outside the public internet: private, loopback, link-local or reserved.

    Names are not: they are judged by the addresses to which they resolve.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return not inner.is_global
    return not address.is_global


def resolves_to_private(host: str) -> bool:
    """Return whether all addresses of a host are private; one that does not resolve is not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return is_private(host)
    return all(is_private(str(address[0])) for *_, address in found)
