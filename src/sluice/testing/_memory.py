"""A source in memory, for tests that open thousands of small files."""

from __future__ import annotations

from sluice._errors import TruncatedError
from sluice._public import public
from sluice.records import AccessFacts, FileIdentity, local_access

__all__ = ["MemorySource"]


@public("sluice.testing")
class MemorySource:
    """Bytes as a source; see ``Source``.

    Args:
        content: The bytes.
        path: Path in messages.

    Example:
        >>> MemorySource(b"0123").read_at(1, 2)
        b'12'
    """

    def __init__(self, content: bytes, *, path: str = "memory") -> None:
        self.path = path
        self.identity = FileIdentity(nbytes=len(content))
        self._content = content

    @property
    def access(self) -> AccessFacts:
        return local_access()

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > len(self._content):
            raise TruncatedError("the file ends too early", file=self.path, offset=offset)
        return self._content[offset : offset + nbytes]

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:  # noqa: ARG002 - the protocol's
        if offset < 0:
            raise TruncatedError("the file ends too early", file=self.path, offset=offset)
        data = self._content[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def forget(self, offset: int, nbytes: int) -> None:
        """Do nothing: bytes are not cached."""

    def check_unchanged(self) -> None:
        """Do nothing: bytes do not change."""

    def close(self) -> None:
        """Do nothing: there is no descriptor."""
