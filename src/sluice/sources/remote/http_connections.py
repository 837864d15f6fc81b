"""Connections to HTTP servers: urllib3, with proxies, and safe to use after a fork.

Connections are kept alive and shared by all objects of a process that have the same settings; they are
closed when the last of these objects is closed or collected. A connection whose answer was not read to its end is
closed, not used again.
"""

from __future__ import annotations

import os
import ssl
import urllib.request
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import urllib3
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url

from sluice._errors import RemoteError, UnsupportedError
from sluice.sources.remote.http_addresses import HttpAddress, Network, may_lead, network_of
from sluice.sources.remote.http_pools import POOLS, private_address_failure, request_failure, requesting

__all__ = ["Connections", "Lease", "shared_connections"]


def _tls_context(*, verify: bool | str, cert: tuple[str, str | None] | None = None) -> ssl.SSLContext:
    """Return the context with the certificates of the system, of certifi if it has none, or of a path.

    Args:
        verify: Whether certificates of servers are checked, or the path of the trusted ones.
        cert: Paths of the client certificate and its key, or None.

    Raises:
        RemoteError: A path has no certificates.
    """
    context = _trusting(verify=verify)
    if cert is not None:
        try:
            context.load_cert_chain(*cert, password="")  # without one, it asks at the terminal
        except (OSError, ValueError) as error:
            problem = "the client certificate or its key cannot be loaded"
            advice = "Pass a PEM file with both, without a password, or the paths of both."
            raise RemoteError(problem, file=cert[0], advice=advice) from error
    return context


def _trusting(*, verify: bool | str) -> ssl.SSLContext:
    if isinstance(verify, str):
        directory = os.path.isdir(verify)
        try:
            return ssl.create_default_context(
                cafile=None if directory else verify, capath=verify if directory else None
            )
        except OSError as error:
            problem = f"the certificates cannot be loaded: {error.strerror or error}"
            raise RemoteError(problem, file=verify, advice="Pass the path of a file of PEM certificates.") from error
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elif not context.cert_store_stats()["x509_ca"] and not os.path.isdir(ssl.get_default_verify_paths().capath or ""):
        try:
            import certifi
        except ModuleNotFoundError:
            return context
        context.load_verify_locations(certifi.where())
    return context


#: ``verify`` of ``Remote``; paths of the client certificate and of its key, if that is another file.
Tls: TypeAlias = tuple[bool | str, tuple[str, str | None] | None]

#: Origins with idle connections, and idle connections of each.
_ORIGINS, _IDLE = 64, 64


class Lease:
    """Keeps connections open as long as an object refers to it."""

    __slots__ = ("__weakref__",)


class Connections:
    """The connections of all objects that have the same settings for TLS."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        #: Process to which the connections belong.
        self.pid = os.getpid()
        self._lease: Callable[[], Lease | None] = lambda: None
        self._managers: dict[tuple[str, str | None, Network | None], urllib3.PoolManager] = {}
        self._proxies: dict[tuple[str, str, int], str | None] = {}

    def get(
        self, address: HttpAddress, headers: Mapping[str, str], *, timeout: float, first: Network | None, path: str
    ) -> urllib3.BaseHTTPResponse:
        """Make one request; return the answer with its body unread.

        Args:
            address: Address of the object.
            headers: Headers of the request.
            timeout: Seconds without progress after which the request failed.
            first: Network of the address that redirects here; None without a redirect.
            path: Address as the user typed it, for errors.

        Raises:
            RequestFailedError: There is no answer.
            UnsupportedError: A proxy of the environment is of an unknown kind.
        """
        manager, absolute = self._manager(address, first, path)
        pool = manager.connection_from_host(address.host, address.port, address.scheme)
        try:
            with requesting(first):
                return pool.urlopen(
                    "GET",
                    address.url if absolute else address.target,
                    headers=headers,
                    retries=False,
                    redirect=False,
                    assert_same_host=False,
                    timeout=urllib3.Timeout(connect=timeout, read=timeout),
                    preload_content=False,
                    decode_content=False,
                )
        except (HTTPError, OSError, ValueError) as error:
            raise request_failure(error) from error

    def lease(self) -> Lease:
        """Return the lease of all users; without one, idle connections are closed."""
        lease = self._lease()
        if lease is None:
            lease = Lease()
            self._lease = weakref.ref(lease)
            weakref.finalize(lease, self._close_idle).atexit = False
        return lease

    def _close_idle(self) -> None:
        managers, self._managers, self._proxies = self._managers, {}, {}
        for manager in managers.values():
            for key in manager.pools.keys():  # noqa: SIM118  (it refuses to be iterated)
                if (pool := manager.pools.get(key)) is not None:
                    pool.close()

    def _manager(self, address: HttpAddress, first: Network | None, path: str) -> tuple[urllib3.PoolManager, bool]:
        """Return the connections for an address, and whether requests to its proxy have the whole URL."""
        if address.origin not in self._proxies:  # macOS and Windows ask the system, which takes longer than a request
            self._proxies[address.origin] = _proxy(address)
        proxy = self._proxies[address.origin]
        if proxy is not None and first is not None and not may_lead(first, network_of(address.host)):
            raise private_address_failure()
        key = address.scheme, proxy, first
        manager = self._managers.get(key)
        if manager is None:
            manager = self._managers.setdefault(key, self._new_manager(address.scheme, proxy, path))
        return manager, proxy is not None and address.scheme == "http"

    def _new_manager(self, scheme: str, proxy: str | None, path: str) -> urllib3.PoolManager:
        arguments: dict[str, Any] = {"num_pools": _ORIGINS, "maxsize": _IDLE}
        if scheme == "https":
            arguments["ssl_context"] = _tls_context(verify=self._tls[0], cert=self._tls[1])
        try:
            if proxy is None:
                manager = urllib3.PoolManager(**arguments)
            else:
                parts = parse_url(proxy if "://" in proxy else f"http://{proxy}")
                headers = urllib3.make_headers(proxy_basic_auth=parts.auth) if parts.auth else None
                manager = urllib3.ProxyManager(parts._replace(auth=None).url, proxy_headers=headers, **arguments)
        except (HTTPError, ValueError, AssertionError):
            # Not raised from the error: its text may have the password of the proxy.
            problem = "the proxy of the environment is not one of HTTP"
            advice = "Set http_proxy and https_proxy to http://host:port, or name the host in no_proxy."
            raise UnsupportedError(problem, file=path, advice=advice) from None
        manager.pool_classes_by_scheme = POOLS
        return manager


def shared_connections(tls: Tls) -> Connections:
    """Return the connections of this process, not of its parent, for these certificates."""
    return _SHARED.setdefault((os.getpid(), tls), Connections(tls))


_SHARED: weakref.WeakValueDictionary[tuple[int, Tls], Connections] = weakref.WeakValueDictionary()


def _proxy(address: HttpAddress) -> str | None:
    """Return the proxy that the environment names for an address."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    host = f"{address.host}:{address.port}"
    return proxy if proxy and not urllib.request.proxy_bypass(host) else None
