"""Remote objects in memory with a version, and sources that read them through a cache directory."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sluice._errors import SourceChangedError
from sluice.sources.protocol import Source, is_caching
from sluice.sources.remote.caching import cached_source
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.location import Remote
from sluice.sources.remote.protocol import Body, ObjectFacts, PieceBody, RequestFailedError
from support.waiting import SkippedTime

PIECE = 100_000


def content(nbytes: int = 10 * PIECE + 1234, seed: int = 0) -> bytes:
    """Return random bytes."""
    return random.Random(seed).randbytes(nbytes)


@dataclass
class VersionedObject:
    """An object whose version is its checksum.

    Its bodies end after ``longest`` bytes, and bring ``piece`` of them at a time, for which they take some seconds. The
    next ``failures`` requests fail.
    """

    content: bytes
    path: str = "https://host/model.bin"
    longest: int = 1 << 40
    piece: int = 1 << 40
    seconds_per_piece: float = 0.0
    failures: int = 0
    requests: list[tuple[int, int]] = field(default_factory=list)
    time: SkippedTime = field(default_factory=SkippedTime)
    closed: int = 0

    @property
    def facts(self) -> ObjectFacts:
        return ObjectFacts(nbytes=len(self.content), version=f'"{zlib.crc32(self.content):x}"')

    def open_first(self, nbytes: int) -> tuple[ObjectFacts, AbstractContextManager[Body]]:
        return self.facts, self.open_range(0, min(nbytes, len(self.content)), self.facts)

    @contextmanager
    def open_range(self, offset: int, nbytes: int, facts: ObjectFacts) -> Iterator[Body]:
        self.requests.append((offset, nbytes))
        if facts != self.facts:
            raise SourceChangedError("the object was replaced", file=self.path)
        if self.failures:
            self.failures -= 1
            raise RequestFailedError("no", temporary=True)
        yield PieceBody(self._pieces(self.content[offset : offset + nbytes][: self.longest]))

    def _pieces(self, content: bytes) -> Iterator[bytes]:
        for start in range(0, len(content), self.piece):
            self.time.sleep(self.seconds_per_piece)
            yield content[start : start + self.piece]

    def close(self) -> None:
        self.closed += 1


def opened(remote: VersionedObject, cache: Path, bound: int | str | None = None) -> Source:
    """Return the object as a source with a cache; the requests are counted from the next one on."""
    file = RemoteFile(remote, sleep=remote.time.sleep, clock=remote.time)
    source = cached_source(file, Remote(remote.path, cache=str(cache), cache_bytes=bound))
    remote.requests.clear()
    return source


def read(source: Source, offset: int, nbytes: int) -> bytes:
    """Return a range of a source, read as loads do, and check that it is whole."""
    buffer = bytearray(nbytes)
    assert source.read_into(offset, memoryview(buffer)) == nbytes
    return bytes(buffer)


def filled(source: Source, arrived: Callable[[int], object] = lambda _: None) -> Source:
    """Return a source after its download."""
    if is_caching(source):
        source.fill(arrived)
    return source


def loaded(source: Source) -> bytes:
    """Return all bytes of a source, as a load that ends."""
    filled(source)
    found = read(source, 0, source.identity.nbytes)
    source.check_unchanged()
    source.close()
    return found


def entries(cache: Path) -> list[Path]:
    """Return the complete files of a cache."""
    return sorted(path for path in cache.iterdir() if "-" in path.name and not path.suffix)


def parts(cache: Path) -> list[Path]:
    """Return the parts of a cache."""
    return sorted(cache.glob("*.part"))
