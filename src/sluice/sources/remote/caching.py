"""Remote files with a cache directory: which are cached, under which name, and how they are read.

The opening request is always made. It tells the version, and whether the server gives this user the object at all. A
version of which all bytes are cached is then an ordinary local file. Any other is requested from the server, until
``fill`` has downloaded all of it. A cache that fails never fails a load.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from msgspec.structs import replace

from sluice._defaults import CACHE_BYTES
from sluice._errors import SluiceError
from sluice._threads import Workers, stopping
from sluice._units import parse_bytes
from sluice.records import FileIdentity, Traffic
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source
from sluice.sources.remote.cache_directory import CacheEntry, CacheFile
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.http_addresses import is_signed
from sluice.sources.remote.location import Remote
from sluice.sources.remote.store_clients import SERVERS, root_of
from sluice.sources.wrappers import ForwardingSource

__all__ = ["CachedFile", "CompleteFile", "cached_source", "object_key"]

#: Parameters of signed addresses that belong to the signature, not to the object; lower case.
_OF_SIGNATURE = re.compile(
    "x-amz-.*|x-goog-.*|signature|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid|"
    "sig|se|ske|skoid|sks|skt|sktid|skv|sp|spr|sr|st|sv"
)

#: Variables, and options, that choose the server or the account of an address.
_VARIABLES = (*SERVERS["s3"], *SERVERS["gs"], *SERVERS["az"], "AZURE_STORAGE_ACCOUNT_NAME", "HF_ENDPOINT")
_PLACE = re.compile("endpoint|base_url|account_name", re.IGNORECASE)

#: Stores of obstore whose versions stay unique after this process: those of a store in memory are counted from 0.
_LASTING_STORES = frozenset({"S3Store", "GCSStore", "AzureStore", "HTTPStore"})

#: Bytes of memory of each thread of a download.
_BUFFER_BYTES = 256 << 10


def cached_source(source: RemoteFile, remote: Remote) -> Source:
    """Return a source that reads an opened remote file through the cache directory of its address.

    Args:
        source: The file, with its opening request made. It is returned, owned or closed.
        remote: The address of the file, with its settings.
    """
    assert remote.cache is not None
    try:
        version, nbytes = _lasting_version(source, remote), source.identity.nbytes
        key = object_key(remote, version, nbytes)
        bound = CACHE_BYTES if remote.cache_bytes is None else parse_bytes(remote.cache_bytes)
        entry = CacheEntry(remote.cache, bound=bound, key=key, nbytes=nbytes)
        if (found := entry.complete()) is None:
            return CachedFile(source, entry)
        complete = CompleteFile(found, source)
    except (OSError, SluiceError) as error:
        source.note = _not_cached(error)
        return source
    source.close()
    return complete


def _not_cached(error: Exception) -> str:
    return f"not cached: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}"


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
    text = "\n".join([_unsigned_address(remote.url), version, str(nbytes), *_places(remote)])
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def _places(remote: Remote) -> Iterator[str]:
    """Yield the settings that choose the server or the account of an address."""
    if remote.store is None and remote.url.lower().startswith(("http://", "https://")):
        return
    settings: dict[str, object] = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    settings |= (remote.options if remote.store is None else getattr(remote.store, "config", None)) or {}
    if remote.store is not None:
        yield root_of(remote.store)
    yield from (f"{name}={settings[name]}" for name in sorted(settings) if _PLACE.search(name))


def _unsigned_address(url: str) -> str:
    """Return an address without credentials and signature. What follows a question mark may still choose the object."""
    before, mark, query = url.partition("?")
    scheme, separator, rest = before.partition("://")
    if separator:
        host, slash, path = rest.partition("/")
        azure = scheme.lower() in {"az", "azure", "abfs", "abfss"}  # container@account
        before = f"{scheme.lower()}://{host if azure else host.rpartition('@')[2]}{slash}{path}"
    parts, signed = query.split("&"), is_signed(query)
    kept = (part for part in parts if not (signed and _OF_SIGNATURE.fullmatch(part.partition("=")[0].lower())))
    return before + mark + "&".join(kept)


class CompleteFile(LocalFile):
    """A remote file of which all bytes are cached: a local file with the address of the remote one; see ``Source``."""

    def __init__(self, cached: CacheFile, remote: RemoteFile) -> None:
        """Use a complete file in place of an opened remote one; raises as ``LocalFile`` does."""
        self._cached: CacheFile | None = cached
        self._version, entry = remote.facts.version, cached.entry
        trailer_bytes = entry.file_bytes - entry.nbytes
        super().__init__(entry.path, shown=remote.path, note="read from the cache", trailer_bytes=trailer_bytes)

    def _identified(self, status: os.stat_result) -> FileIdentity:
        # The time of the last change is that of the last use by any process.
        return replace(super()._identified(status), ctime_ns=0, version=self._version)

    def close(self) -> None:
        super().close()
        if self._cached is not None:
            self._cached.unlock()
        self._cached = None


class CachedFile(ForwardingSource):
    """A remote file that was not completely cached when it was opened; see ``Source``."""

    def __init__(self, remote: RemoteFile, entry: CacheEntry) -> None:
        """Own the file; the cache is not touched before ``fill``."""
        super().__init__(remote)
        self._remote, self._entry, self._filled, self._filling = remote, entry, False, False
        self._lock = threading.RLock()
        self.expect = remote.expect
        #: Why the file was not cached, as a clause; None if nothing failed.
        self.note: str | None = None

    @property
    def traffic(self) -> Traffic:
        return self._remote.traffic

    def request(self, offset: int, nbytes: int) -> AbstractContextManager[Source]:
        return nullcontext(self) if self._filled else self._remote.request(offset, nbytes)

    def check_unchanged(self) -> None:
        super().check_unchanged()
        if self._filled:
            self._remote.expected.look(0, self.identity.nbytes, lambda at, end: self.read_at(at, end - at))

    def fill(self, report: Callable[[int], object]) -> None:
        """Download what is missing, unless that has failed before; ``note`` has the problem if the system refuses."""
        with self._lock:
            if self._filling or self._filled or self.note is not None:  # filling: the progress function reads
                return
            self._filling = True
            try:
                with self._entry.writing(partial(report, 0)) as part:
                    if part is not None:
                        self._download(part, report)
                if (found := self._entry.complete()) is None:
                    raise FileNotFoundError(0, "the file was removed meanwhile")
                self._source, self._filled = CompleteFile(found, self._remote), True
            except SluiceError:  # some of them are errors of the system as well
                raise
            except OSError as error:
                self.note = _not_cached(error)
            finally:
                self._filling = False

    def _download(self, part: CacheFile, report: Callable[[int], object]) -> None:
        """Request the pieces that a part does not have, and publish it."""
        here = part.right()
        report(sum(end - start for start, end in map(self._entry.piece, here)))
        missing = [number for number in self._entry.pieces if number not in here]
        with Workers(min(self.access.parallel_requests, len(missing)), "sluice-download") as workers:
            for task in [workers.start(partial(self._fetch, part, number)) for number in missing]:
                report(task.result())
        part.publish()

    def _fetch(self, part: CacheFile, number: int) -> int:
        """Request a piece, write it and return its size."""
        start, end = self._entry.piece(number)
        at, crc = start, 0
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, end - at)))
        with self._remote.request(at, end - at) as opened:
            while at < end and not stopping():
                some = buffer[: end - at]
                opened.read_into(at, some)
                crc = zlib.crc32(some, crc)
                while some:
                    written = os.pwrite(part.file.fileno(), some, at)
                    at, some = at + written, some[written:]
        if number % 8 == 7:  # bytes on their way to the disk count as memory of a container
            os.fdatasync(part.file.fileno())
        if at == end:
            part.arrived(number, crc)
        return end - start

    def close(self) -> None:
        super().close()
        self._remote.close()
