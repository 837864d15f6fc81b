"""Security of HTTP connections: certificates, and logs without signatures."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sluice._errors import RemoteError

__all__ = ["tls_context", "without_queries_in_logs"]


def tls_context(*, verify: bool | str, cert: tuple[str, str | None] | None = None) -> ssl.SSLContext:
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
            context.load_cert_chain(*cert, password=_no_password)
        except (OSError, ValueError) as error:
            problem = "the client certificate or its key cannot be loaded"
            advice = "Pass a PEM file with both, without a password, or the paths of both."
            raise RemoteError(problem, file=cert[0], advice=advice) from error
    return context


def _no_password() -> str:
    """Refuse to ask at the terminal."""
    raise ValueError("the key has a password")


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


@contextmanager
def without_queries_in_logs() -> Iterator[None]:
    """Remove queries, which may be signatures, from what urllib3 logs in this thread until the block ends."""
    _REQUESTS.active = True
    try:
        yield
    finally:
        _REQUESTS.active = False


class _WithoutQueries(logging.Filter):
    """Remove queries from what urllib3 logs about requests of sluice."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(_REQUESTS, "active", False) and isinstance(record.args, tuple):
            record.args = tuple(
                each.partition("?")[0] + "?..." if isinstance(each, str) and "?" in each else each
                for each in record.args
            )
        return True


_REQUESTS = threading.local()
for _logger in ("urllib3.connection", "urllib3.connectionpool"):
    logging.getLogger(_logger).addFilter(_WithoutQueries())
