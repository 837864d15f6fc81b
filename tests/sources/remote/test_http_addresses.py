"""Addresses of HTTP: what is sent, what is refused, and which hosts are private."""

from __future__ import annotations

import socket
from typing import get_args
from unittest.mock import Mock

import pytest

from sluice._errors import RemoteError
from sluice.sources.remote.http_addresses import (
    HttpAddress,
    Network,
    may_lead,
    network_of,
    next_address,
    parse_address,
    resolved_network,
)
from sluice.sources.remote.protocol import RequestFailedError


@pytest.mark.parametrize(
    ("url", "address", "authorization"),
    [
        ("http://host", HttpAddress("http", "host", 80, "/"), None),
        ("HTTPS://Host:8443/a%2fb?c=%20#d", HttpAddress("https", "host", 8443, "/a%2fb?c=%20"), None),
        ("https://[::1]:1/x y", HttpAddress("https", "::1", 1, "/x%20y"), None),
        ("https://bücher.example/ü", HttpAddress("https", "xn--bcher-kva.example", 443, "/%C3%BC"), None),
        ("http://u:p%3A@host/", HttpAddress("http", "host", 80, "/"), "Basic dTpwOg=="),
        ("http://token@host/", HttpAddress("http", "host", 80, "/"), "Basic dG9rZW46"),
    ],
)
def test_parts_of_a_url(url: str, address: HttpAddress, authorization: str | None) -> None:
    assert parse_address(url) == (address, authorization)
    assert parse_address(address.url)[0] == address


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://u:geheim@:80/",
        "ftp://u:geheim@h/",
        "http://u:geheim@h:99999/",
        "http://u:geheim@[::/x",
        "http://u:geheim@h/\udc80",
        "http://u:geheim\udc80@h/",
    ],
)
def test_what_is_not_a_url_of_http_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(RemoteError, match="not a URL of HTTP") as caught:
        parse_address(url)
    assert "geheim" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/b", "https://host:8443/b"),
        ("c?d", "https://host:8443/a/c?d"),
        ("//other/e", "https://other/e"),
        ("https://u:p@other:1/f", "https://other:1/f"),
        ("/mod\xc3\xa8le", "https://host:8443/mod%C3%A8le"),  # as the library decodes the UTF-8 of a header
        ("/\xe8", "https://host:8443/%C3%A8"),
    ],
)
def test_where_a_redirect_leads(location: str, url: str) -> None:
    assert next_address(parse_address("https://host:8443/a/b")[0], location).url == url


@pytest.mark.parametrize("location", [None, "", "http://host:8443/a", "file:///x", "https://:1/"])
def test_redirects_that_are_refused(location: str | None) -> None:
    with pytest.raises(RequestFailedError) as caught:
        next_address(parse_address("https://host:8443/a/b")[0], location)
    assert not caught.value.temporary


NETWORKS = {
    "private": "10.0.0.1 100.64.0.1 192.168.1.1 fd00::1 ::ffff:10.0.0.1 64:ff9b::a00:1 2002:a00:1::",
    "loopback": "127.0.0.1 0.0.0.0 localhost a.localhost ::1 :: ::ffff:127.0.0.1",
    "reserved": "169.254.169.254 fe80::1%eth0 ::ffff:169.254.169.254 fd00:ec2::254 100.100.100.200",
    "public": "8.8.8.8 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808 host.example 10",
}


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_of_addresses(network: str) -> None:
    assert {network_of(host) for host in NETWORKS[network].split()} == {network}


@pytest.mark.parametrize(
    ("first", "targets"),
    [
        ("public", {"public"}),
        ("private", {"public", "private"}),
        ("loopback", {"public", "private", "loopback"}),
        ("reserved", {"public", "reserved"}),
    ],
)
def test_where_redirects_may_lead(first: Network, targets: set[Network]) -> None:
    """In particular not from a private address to the metadata service of a cloud."""
    assert {target for target in get_args(Network) if may_lead(first, target)} == targets


@pytest.mark.parametrize(
    ("addresses", "network"),
    [
        (["10.0.0.1"], "private"),
        (["10.0.0.1", "8.8.8.8"], "public"),
        (["fd00::1", "127.0.0.1"], "private"),
        (["127.0.0.1", "169.254.1.1"], "public"),
    ],
)
def test_the_network_of_a_name_is_that_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], network: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (each, 0)) for each in addresses])
    assert resolved_network("host.example") == network


def test_a_name_that_does_not_resolve_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror(socket.EAI_NONAME, "unknown")))
    assert resolved_network("host.example") == "public"
    assert resolved_network("10.0.0.1") == "private"
