"""Clients of object stores: what the address of an object means, and an obstore client for it.

obstore reads credentials, region and endpoint from the variables that the command-line tools of the stores use.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from sluice import _defaults as defaults
from sluice._errors import UnsupportedError
from sluice.sources.remote.location import Remote
from sluice.sources.remote_names import without_credentials

__all__ = [
    "SERVERS",
    "StoreAddress",
    "is_store",
    "make_store",
    "obstore_library",
    "parse_address",
    "root_of",
    "shown",
    "skips_signatures",
]

#: Processes that have used obstore: this one, or one from which it was forked. The threads of obstore do not survive a
#: fork, and its calls would wait for them forever.
_USERS: set[int] = set()

#: Use of a client.
Purpose: TypeAlias = Literal["read", "list", "write"]

#: More repetitions than fit into ``REMOTE_PATIENCE_SECONDS``.
_MOST_RETRIES = 1000

#: Kind of store by scheme.
_KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}

#: Variables that name the server of each kind of store.
SERVERS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}

#: Variables with which obstore finds credentials of S3 without files of the command-line tool.
_S3_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


class StoreAddress(Struct, frozen=True, kw_only=True):
    """An address of an object store in parts."""

    #: ``s3``, ``gs`` or ``az``.
    kind: str
    #: Bucket or container.
    bucket: str
    #: Account of Azure; None if a variable names it.
    account: str | None
    #: Key of an object or prefix, unchanged: percent signs in addresses of object stores are not decoded.
    key: str
    #: The address without credentials and key, with a slash at the end.
    root: str


def is_store(url: str) -> bool:
    """Return whether a URL is that of an object store."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme.lower() in _KINDS


def parse_address(url: str) -> StoreAddress:
    """Return the parts of ``s3://bucket/key``, ``gs://bucket/key`` or ``az://container@account/key``.

    Raises:
        UnsupportedError: It names no bucket.
    """
    scheme, _, rest = url.partition("://")
    host, _, key = rest.partition("/")
    kind = _KINDS[scheme.lower()]
    account = None
    if kind == "az":
        host, _, named = host.partition("@")
        account = named.partition(".")[0] or None
    else:
        host = host.rpartition("@")[2]
    if not host or ":" in host:
        example = f"{scheme}://bucket/name.safetensors"
        problem = "the address names no bucket"
        advice = "Name the bucket. Credentials belong into options= or variables."
        raise UnsupportedError(problem, file=without_credentials(url), expected=example, advice=advice)
    at_account = f"@{account}" if account else ""
    return StoreAddress(kind=kind, bucket=host, account=account, key=key, root=f"{scheme}://{host}{at_account}/")


def shown(root: str, key: str) -> str:
    """Return an address for messages: without what may be a signature, although keys may have question marks."""
    return root + re.split("[?#]", key, maxsplit=1)[0]


def obstore_library(path: str) -> Any:
    """Import obstore.

    Raises:
        UnsupportedError: It is not installed, or this process was forked from one that uses it.
    """
    if _USERS and os.getpid() not in _USERS:
        problem = "object stores cannot be read in a process that was forked from one that has read them"
        raise UnsupportedError(problem, file=path, advice="Start processes with 'spawn' or 'forkserver'.")
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        problem = "object stores need the library obstore"
        raise UnsupportedError(problem, file=path, advice="pip install 'sluice[remote]'") from error
    _USERS.add(os.getpid())
    return obstore


def make_store(address: StoreAddress, remote: Remote, purpose: Purpose = "read") -> Any:
    """Return a client of a bucket; nothing is requested.

    Args:
        address: The bucket.
        remote: Settings and options of the user, which win over variables.
        purpose: Use of the client. obstore repeats failed requests to list and to write; S3 checks the sum of each part
            that is written.

    Raises:
        UnsupportedError: obstore is not installed, or refuses an option.
    """
    library = obstore_library(address.root)
    if remote.cert:
        problem, advice = "cert= is for http; obstore sends no client certificates", "Pass credentials in options=."
        raise UnsupportedError(problem, file=address.root, advice=advice)
    config = dict(remote.options or {})
    if address.account:
        config["account_name"] = address.account
    more: dict[str, Any] = {}
    named = any("access_key" in name.lower() or "skip_signature" in name.lower() for name in config)
    named = named or any(os.environ.get(name) for name in _S3_CREDENTIALS)
    if address.kind == "s3" and not named and (provider := _profile_credentials()):
        more["credential_provider"] = provider
    if purpose == "write" and address.kind == "s3" and "AWS_CHECKSUM_ALGORITHM" not in os.environ:
        config.setdefault("checksum_algorithm", "sha256")
    kinds = {"s3": library.store.S3Store, "gs": library.store.GCSStore, "az": library.store.AzureStore}
    try:
        return kinds[address.kind](
            address.bucket,
            config=config or None,
            client_options=_client_options(address.kind, config, remote),
            # A read is repeated by RemoteFile, which resumes and keeps the limit in time.
            retry_config={
                "max_retries": 0 if purpose == "read" else _MOST_RETRIES,
                "backoff": {
                    "init_backoff": timedelta(seconds=defaults.REMOTE_FIRST_PAUSE),
                    "max_backoff": timedelta(seconds=defaults.REMOTE_LONGEST_PAUSE),
                    "base": 2,
                },
                "retry_timeout": timedelta(seconds=defaults.REMOTE_PATIENCE_SECONDS),
            },
            **more,
        )
    except (library.exceptions.BaseError, ValueError, TypeError, OSError) as error:
        problem = f"the client of the store cannot be made ({type(error).__name__})"
        advice = "Check the options and the variables of the store: an address, a region or a key has a wrong form."
        # Not chained: the text of the cause may hold credentials.
        raise UnsupportedError(problem, file=address.root, advice=advice) from None


def skips_signatures(store: Any) -> bool:
    """Return whether the user has switched signatures of a client of S3 off, or has written anything about it."""
    return bool(store.config.get("skip_signature") or os.environ.get("AWS_SKIP_SIGNATURE"))


def root_of(store: Any) -> str:
    """Return the address of a store object without credentials, with a slash at the end."""
    kind = type(store).__name__
    schemes = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az"}
    if kind in schemes:
        config = store.config
        host = config.get("bucket") or config.get("container_name") or ""
        root = f"{schemes[kind]}://{host}"
    elif kind == "HTTPStore":
        root = without_credentials(str(store.url)).rstrip("/")
    else:
        root = f"{kind}:"
    prefix = str(getattr(store, "prefix", None) or "").strip("/")
    return f"{root}/{prefix}/" if prefix else f"{root}/"


def _client_options(kind: str, config: Mapping[str, Any], remote: Remote) -> dict[str, Any]:
    seconds = defaults.REMOTE_TIMEOUT_SECONDS if remote.timeout is None else remote.timeout
    made: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=seconds),
        "read_timeout": timedelta(seconds=seconds),
        # Of a whole answer, 30 s if not given: a large body on a slow line may take longer.
        "timeout": timedelta(days=1),
        # Without TLS only where the user has named such an endpoint.
        "allow_http": _endpoint(kind, config).startswith("http://"),
    }
    if remote.headers:
        made["default_headers"] = dict(remote.headers)
    if remote.verify is False:
        made["allow_invalid_certificates"] = True
    elif isinstance(remote.verify, str):
        made["root_certificate"] = Path(remote.verify).read_bytes()
    return made


def _endpoint(kind: str, config: Mapping[str, Any]) -> str:
    given = (value for name, value in config.items() if "endpoint" in name.lower() or "base_url" in name.lower())
    return str(next(given, None) or next((os.environ[name] for name in SERVERS[kind] if os.environ.get(name)), ""))


def _profile_credentials() -> Any:
    """Return the credentials of a profile of the AWS command-line tool, which obstore leaves to boto3; else None."""
    files = ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config")
    found = any(os.path.exists(os.environ.get(name) or os.path.expanduser(usual)) for name, usual in files)
    if not (found or os.environ.get("AWS_PROFILE")) or importlib.util.find_spec("boto3") is None:
        return None
    import boto3.session
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.session.Session()
    return Boto3CredentialProvider(session) if session.get_credentials() is not None else None
