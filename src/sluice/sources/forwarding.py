"""Base class of sources that wrap a source. They implement the reads themselves."""

from __future__ import annotations

from sluice.records import AccessFacts, FileIdentity
from sluice.sources.protocol import Source

__all__ = ["ForwardingSource"]


class ForwardingSource:
    """Forwards everything but reads to the wrapped source; see ``Source``."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def path(self) -> str:
        return self._source.path

    @property
    def identity(self) -> FileIdentity:
        return self._source.identity

    @property
    def access(self) -> AccessFacts:
        return self._source.access

    def forget(self, offset: int, nbytes: int) -> None:
        self._source.forget(offset, nbytes)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()
