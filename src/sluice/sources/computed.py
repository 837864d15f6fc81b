"""Sources whose bytes are computed when they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from sluice.records import AccessFacts, FileIdentity, local_access
from sluice.sources.protocol import DirectIOUnavailable
from sluice.sources.short_reads import too_early

if TYPE_CHECKING:
    from sluice.checkpoint.open_checkpoint import OpenCheckpoint

__all__ = ["ComputedSource"]


class ComputedSource(ABC):
    """See ``Source``; subclasses compute ranges."""

    #: Ranges that are computed at once.
    at_once: ClassVar[int] = 1
    #: Host memory of the computation, in bytes.
    working_bytes: int = 0

    def __init__(self, path: str, inputs: OpenCheckpoint, nbytes: int) -> None:
        """Compute nothing yet; ``path`` is a name for messages."""
        self.path, self.inputs = path, inputs
        self.identity = FileIdentity(nbytes=nbytes)

    @property
    def access(self) -> AccessFacts:
        """See ``Source``: each thread keeps freed memory of what it has computed, so that they are few."""
        return replace(local_access(), parallel_requests=self.at_once)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """See ``Source``."""
        if offset < 0 or not 0 <= nbytes <= self.identity.nbytes - offset:
            raise too_early(self.path, offset, nbytes, self.identity.nbytes - offset)
        content = bytearray(nbytes)
        self.read_into(offset, memoryview(content))
        return bytes(content)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        """See ``Source``; bytes between two tensors stay as they are in the buffer."""
        if direct:
            raise DirectIOUnavailable(self.path)
        if offset < 0:
            raise too_early(self.path, offset, len(buffer), 0)
        nbytes = max(0, min(len(buffer), self.identity.nbytes - offset))
        if nbytes:
            self.compute(offset, buffer[:nbytes])
        return nbytes

    @abstractmethod
    def compute(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from ``offset`` on."""

    def check_unchanged(self) -> None:
        """See ``Source``: of all inputs."""
        for source in self.inputs.sources:
            source.check_unchanged()

    def forget(self, offset: int, nbytes: int) -> None:
        """Do nothing: no bytes are cached."""
        del offset, nbytes
