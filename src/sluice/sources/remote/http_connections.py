"""Connections to HTTP servers: urllib3, with proxies, and safe to use after a fork.

Connections are kept alive and shared by all objects of a process that have the same settings, until the last of them
is closed. A connection whose answer was not read to its end is closed, not used again.
"""

from __future__ import annotations

import os
import threading
import urllib.request
import weakref
from collections.abc import Mapping
from typing import Any, TypeAlias

import urllib3
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url

from sluice._errors import UnsupportedError
from sluice.sources.remote.http_addresses import HttpAddress, Network, may_lead, network_of
from sluice.sources.remote.http_body import request_failure
from sluice.sources.remote.http_pools import POOLS, private_address_failure, redirected_from
from sluice.sources.remote.http_security import tls_context, without_queries_in_logs

__all__ = ["Connections", "shared_connections"]

#: Trusted certificates and the client certificate, as in ``RemoteSettings``.
Tls: TypeAlias = tuple[bool | str, tuple[str, str | None] | None]

#: Origins with idle connections, and idle connections of each.
_ORIGINS, _IDLE = 64, 64


class Connections:
    """The connections of all objects that have the same settings for TLS."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        #: Reentrant: a finalizer may run in the thread that holds it.
        self._lock = threading.RLock()
        self._borrowers = 0
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
            with without_queries_in_logs(), redirected_from(first):
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

    def lend(self, borrower: object) -> weakref.finalize[..., object]:
        """Return what ends the use by an object, called at the latest when it is collected."""
        with self._lock:
            self._borrowers += 1
        finalizer = weakref.finalize(borrower, self._returned)
        finalizer.atexit = False
        return finalizer

    def _returned(self) -> None:
        """Close idle connections after the last use."""
        with self._lock:
            self._borrowers -= 1
            if self._borrowers:
                return
            managers, self._managers, self._proxies = self._managers, {}, {}
        for manager in managers.values():
            for key in manager.pools.keys():  # noqa: SIM118  (it refuses to be iterated)
                if (pool := manager.pools.get(key)) is not None:
                    pool.close()

    def start_anew(self) -> None:
        """Forget connections and locks after a fork: they are those of the parent process."""
        self._lock = threading.RLock()
        self._managers = {}

    def _manager(self, address: HttpAddress, first: Network | None, path: str) -> tuple[urllib3.PoolManager, bool]:
        """Return the connections for an address, and whether requests to its proxy have the whole URL."""
        if address.origin not in self._proxies:  # macOS and Windows ask the system, which takes longer than a request
            self._proxies[address.origin] = _proxy(address)
        proxy = self._proxies[address.origin]
        if proxy is not None and first is not None and not may_lead(first, network_of(address.host)):
            raise private_address_failure()
        with self._lock:
            key = address.scheme, proxy, first
            manager = self._managers.get(key)
            if manager is None:
                manager = self._managers[key] = self._new_manager(address.scheme, proxy, path)
                manager.pool_classes_by_scheme = POOLS
        return manager, proxy is not None and address.scheme == "http"

    def _new_manager(self, scheme: str, proxy: str | None, path: str) -> urllib3.PoolManager:
        arguments: dict[str, Any] = {"num_pools": _ORIGINS, "maxsize": _IDLE}
        if scheme == "https":
            arguments["ssl_context"] = tls_context(verify=self._tls[0], cert=self._tls[1])
        if proxy is None:
            return urllib3.PoolManager(**arguments)
        try:
            parts = parse_url(proxy if "://" in proxy else f"http://{proxy}")
            headers = urllib3.make_headers(proxy_basic_auth=parts.auth) if parts.auth else None
            return urllib3.ProxyManager(parts._replace(auth=None).url, proxy_headers=headers, **arguments)
        except (HTTPError, ValueError, AssertionError):
            # Not raised from the error: its text may have the password of the proxy.
            problem = "the proxy of the environment is not one of HTTP"
            advice = "Set http_proxy and https_proxy to http://host:port, or name the host in no_proxy."
            raise UnsupportedError(problem, file=path, advice=advice) from None


def shared_connections(tls: Tls) -> Connections:
    """Return the connections for ``verify`` and ``cert`` of ``RemoteSettings``."""
    with _shared_lock:
        connections = _SHARED.get(tls)
        if connections is None:
            connections = _SHARED[tls] = Connections(tls)
        return connections


def _after_fork() -> None:
    global _shared_lock  # noqa: PLW0603  (a thread of the parent process may hold it)
    _shared_lock = threading.Lock()
    for connections in list(_SHARED.values()):
        connections.start_anew()


_shared_lock = threading.Lock()
_SHARED: weakref.WeakValueDictionary[Tls, Connections] = weakref.WeakValueDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _proxy(address: HttpAddress) -> str | None:
    """Return the proxy that the environment names for an address."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    host = f"{address.host}:{address.port}"
    return proxy if proxy and not urllib.request.proxy_bypass(host) else None
