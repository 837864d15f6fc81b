"""Remote files with a cache directory: which are cached, under which name, and how they are read.

The opening request is always made. It tells the version, and whether the server gives this user the object at all. A
version of which all bytes are cached is then an ordinary local file. A cache that fails never fails a load.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator

from sluice._errors import SluiceError
from sluice.sources.protocol import Source
from sluice.sources.remote.cache_directory import CacheDirectory, CacheEntry
from sluice.sources.remote.cached_file import CachedFile, CompleteFile
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.http_addresses import is_signed
from sluice.sources.remote.location import Remote
from sluice.sources.remote.store_clients import root_of

__all__ = ["cached_source", "object_key"]

#: Parameters of signed addresses that belong to the signature, not to the object; lower case.
_OF_SIGNATURE = re.compile(
    "x-amz-.*|x-goog-.*|signature|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid|"
    "sig|se|ske|skoid|sks|skt|sktid|skv|sp|spr|sr|st|sv"
)

#: Variables and options that choose the server or the account of an address.
_PLACES = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "GOOGLE_BASE_URL",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "HF_ENDPOINT",
)
_PLACE_OPTION = re.compile("endpoint|base_url|account_name")

#: Stores of obstore whose versions stay unique after this process: those of a store in memory are counted from 0.
_LASTING_STORES = frozenset({"S3Store", "GCSStore", "AzureStore", "HTTPStore"})


def cached_source(source: Source, remote: Remote) -> Source:
    """Return a source that reads an opened remote file through the cache directory of its address, if it has one.

    Args:
        source: The file, with its opening request made. It is returned, or closed.
        remote: The address of the file, with its settings.
    """
    if remote.cache is None or not isinstance(source, RemoteFile):
        return source  # a local file already, such as one of the cache of huggingface_hub
    try:
        version, nbytes = _lasting_version(source, remote), source.identity.nbytes
        entry = CacheEntry(key=object_key(remote, version, nbytes), nbytes=nbytes, version=version)
        cache = CacheDirectory(remote.cache, remote.cache_bound)
        found = cache.complete(entry)
        if found is None:
            return CachedFile(source, cache, entry)
        complete = CompleteFile(found, source.path)
    except (OSError, SluiceError) as error:
        source.note = f"not cached: {getattr(error, 'strerror', None) or error}"
        return source
    source.close()
    return complete


def _lasting_version(source: RemoteFile, remote: Remote) -> str:
    """Return the version of an opened file.

    Raises:
        OSError: It cannot be cached.
    """
    if not source.pinned:
        raise OSError("fsspec cannot name the version in its requests")
    if source.facts.version is None:
        raise OSError("the server does not name its version (a strong ETag)")
    if remote.store is not None and type(remote.store).__name__ not in _LASTING_STORES:
        raise OSError("versions of this store are not unique")
    return source.facts.version


def object_key(remote: Remote, version: str, nbytes: int) -> str:
    """Return the name of the entry of one version of an object.

    It depends on the address without credentials and signature, on the endpoint or account that settings and variables
    name, and on version and size.
    """
    text = "\n".join([_plain_address(remote), version, str(nbytes), *_places(remote)])
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def _places(remote: Remote) -> Iterator[str]:
    """Yield the settings that choose the server or the account of an address."""
    if remote.store is None and remote.url.lower().startswith(("http://", "https://")):
        return
    given = dict(remote.options or {})
    if remote.store is not None:
        given = dict(getattr(remote.store, "config", None) or {})
        yield root_of(remote.store)
    yield from (f"{name}={os.environ[name]}" for name in _PLACES if os.environ.get(name))
    yield from (f"{name}={given[name]}" for name in sorted(given) if _PLACE_OPTION.search(str(name).lower()))


def _plain_address(remote: Remote) -> str:
    """Return an address without credentials and signature. What follows a question mark may still choose the object."""
    before, mark, query = remote.url.partition("?")
    scheme, separator, rest = before.partition("://")
    if separator:
        host, slash, path = rest.partition("/")
        azure = scheme.lower() in {"az", "azure", "abfs", "abfss"}  # container@account
        before = f"{scheme.lower()}://{host if azure else host.rpartition('@')[2]}{slash}{path}"
    return before + mark + "&".join(_unsigned(query))


def _unsigned(query: str) -> list[str]:
    """Return the parameters of a query without those of a signature, if it has one."""
    parts = query.split("&")
    if not is_signed(query):
        return parts
    return [part for part in parts if not _OF_SIGNATURE.fullmatch(part.partition("=")[0].lower())]
