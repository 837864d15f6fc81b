"""The conformance suite of sources: the package's sources pass, and each check fails for a broken source."""

# ruff: noqa: ARG002 - methods have the arguments of the protocol
from __future__ import annotations

import errno
import io
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sluice._errors import ReadError, SourceChangedError, TruncatedError
from sluice.records import AccessFacts, FileIdentity
from sluice.sources.local import LocalFile
from sluice.sources.memory import MemoryFile
from sluice.sources.protocol import DirectIOUnavailable, Source
from sluice.sources.read_ahead import ReadAhead
from sluice.sources.section import Section
from sluice.testing import FaultySource, MemorySource, RecordingSource, check_source

CONTENT = random.Random(1).randbytes(30_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "f.bin").write_bytes(CONTENT)
    os.utime(tmp_path / "f.bin", (1, 1))
    return tmp_path / "f.bin"


@contextmanager
def failing_reads() -> Iterator[None]:
    """Make every read of the system fail."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        yield


def rewrite(path: Path) -> Callable[[], object]:
    return lambda: path.write_bytes(CONTENT[::-1])


@pytest.mark.parametrize(
    "wrap",
    [lambda source: source, ReadAhead, RecordingSource, lambda source: FaultySource(source, at=1 << 60)],
    ids=["LocalFile", "ReadAhead", "RecordingSource", "FaultySource"],
)
def test_local_files_and_what_wraps_them(path: Path, wrap: Callable[[Source], Source]) -> None:
    check_source(lambda: wrap(LocalFile(path)), CONTENT, change=rewrite(path), failing=failing_reads)


def test_streams_in_memory() -> None:
    stream = io.BytesIO(CONTENT)
    check_source(lambda: MemoryFile(stream), CONTENT, change=lambda: stream.truncate(20_000))


@pytest.mark.parametrize("missing", ["preadv", "posix_fadvise", "O_DIRECT"])
def test_local_files_on_systems_with_fewer_features(path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delattr(os, missing)
    monkeypatch.setattr("sluice.sources.local._HAS_PREADV", missing != "preadv")
    check_source(lambda: LocalFile(path), CONTENT, change=rewrite(path))


def test_memory() -> None:
    check_source(lambda: MemorySource(CONTENT), CONTENT)


def test_sections() -> None:
    around = MemorySource(bytes(100) + CONTENT + bytes(9))
    check_source(lambda: Section(around, 100, len(CONTENT)), CONTENT)
    known = [(0, CONTENT[:1000]), (len(CONTENT) - 500, CONTENT[-500:])]
    check_source(lambda: Section(around, 100, len(CONTENT), known=known), CONTENT)


def test_short_content_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8193"):
        check_source(lambda: MemorySource(b"short"), b"short")


class Flawed(MemorySource):
    """A correct source in memory; each subclass breaks one requirement."""

    def __init__(self) -> None:
        super().__init__(CONTENT)

    def put(self, offset: int, buffer: memoryview) -> int:
        return super().read_into(offset, buffer)

    def take(self, offset: int, nbytes: int) -> bytes:
        return super().read_at(offset, nbytes)


def having(**attributes: Any) -> Callable[[], Source]:
    """Return a function that makes a source with other methods and attributes."""
    methods = {name: value for name, value in attributes.items() if callable(value) or name == "access"}

    def make() -> Source:
        source = type("Changed", (Flawed,), methods)()
        vars(source).update({name: value for name, value in attributes.items() if name not in methods})
        return source  # type: ignore[no-any-return]

    return make


def requests(request_bytes: int = 1 << 20, *, gap: int = 0, parallel: int = 1) -> AccessFacts:
    return AccessFacts(request_bytes=request_bytes, gap_bytes=gap, parallel_requests=parallel)


class OtherIdentityEachTime(Flawed):
    def __init__(self) -> None:
        super().__init__()
        self.identity = replace(self.identity, inode=id(self))


class PythonsErrors(Flawed):
    def read_at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > len(CONTENT):
            raise EOFError
        return super().read_at(offset, nbytes)


class NamelessError(Flawed):
    def read_at(self, offset: int, nbytes: int) -> bytes:
        try:
            return super().read_at(offset, nbytes)
        except TruncatedError:
            raise TruncatedError("too short") from None


class ShortReads(Flawed):
    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        return self.put(offset, buffer[:1000])


class CountsButDoesNotFill(Flawed):
    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        self.put(offset, buffer[: len(buffer) // 2])
        return max(0, min(len(buffer), len(CONTENT) - offset))


class WritesAroundItsBuffer(Flawed):
    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        found = self.put(offset, buffer)
        whole = buffer.obj
        if isinstance(whole, bytearray) and len(whole) > len(buffer):
            whole[-1] = 0
        return found


class RaisesAtTheEnd(Flawed):
    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        buffer[:] = self.read_at(offset, len(buffer))
        return len(buffer)


class CountsFromTheEnd(Flawed):
    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        found = CONTENT[offset:][: len(buffer)]
        buffer[: len(found)] = found
        return len(found)


class AsksForNothing(Flawed):
    def read_at(self, offset: int, nbytes: int) -> bytes:
        if nbytes == 0:
            raise ReadError("an empty range", file=self.path, offset=offset)
        return super().read_at(offset, nbytes)


class KeepsTheBuffer(Flawed):
    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        self.kept = buffer[:1]
        return self.put(offset, buffer)


class OneBufferForAll(Flawed):
    def __init__(self) -> None:
        super().__init__()
        self.shared = b""
        self.spoilt = False

    def read_at(self, offset: int, nbytes: int) -> bytes:
        mine = self.shared = super().read_at(offset, nbytes)
        while threading.current_thread() is not threading.main_thread() and not self.spoilt:
            self.spoilt = self.shared is not mine  # another thread has overwritten the bytes
            time.sleep(0.001)
        return self.shared


class FailsInThreads(Flawed):
    def read_at(self, offset: int, nbytes: int) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("made in another thread")
        return super().read_at(offset, nbytes)


class AlwaysChanged(Flawed):
    def check_unchanged(self) -> None:
        raise SourceChangedError("it changed", file=self.path)


class ClosesOnce(Flawed):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise ValueError("closed twice")
        self.closed = True


@pytest.mark.parametrize(
    ("flawed", "check"),
    [
        (having(path="https://me:secret@host/f.bin"), "path"),
        (having(path="https://host/f.bin?X-Signature=secret"), "path"),
        (having(identity=FileIdentity(nbytes=1)), "identity"),
        (OtherIdentityEachTime, "identity"),
        (having(access=requests((1 << 20) + 1)), "access"),
        (having(access=requests(4096)), "access"),
        (having(access=requests(gap=-1)), "access"),
        (having(access=requests(parallel=0)), "access"),
        (having(read_at=lambda self, *at: bytearray(self.take(*at))), "read_at"),
        (having(read_at=lambda self, offset, nbytes: self.take(max(0, offset - 1), nbytes)), "read_at"),
        (having(read_at=lambda _, offset, nbytes: CONTENT[offset : offset + nbytes]), "read_at_outside"),
        (PythonsErrors, "read_at_outside"),
        (NamelessError, "read_at_outside"),
        (ShortReads, "read_into"),
        (CountsButDoesNotFill, "read_into"),
        (WritesAroundItsBuffer, "read_into"),
        (RaisesAtTheEnd, "read_into_at_the_end"),
        (CountsFromTheEnd, "read_into_at_the_end"),
        (AsksForNothing, "no_bytes"),
        (KeepsTheBuffer, "buffer_is_not_kept"),
        (
            having(read_into=lambda self, at, buffer, direct=False: self.put(at, buffer) if not direct else 4096),
            "direct",
        ),
        (OneBufferForAll, "threads"),
        (FailsInThreads, "threads"),
        (having(forget=lambda self, *_: self.__dict__.update(_stream=io.BytesIO(bytes(30_000)))), "forget"),
        (having(forget=lambda *_: int("an error")), "forget"),
        (AlwaysChanged, "unchanged"),
        (ClosesOnce, "close"),
        (having(close=lambda self: self.__dict__.update(_stream=io.BytesIO())), "close"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_a_check_is_for(flawed: Callable[[], Source], check: str) -> None:
    assert check in failed(flawed)


def failed(
    make_source: Callable[[], Source], change: Callable[[], object] | None = None, *, fail: bool = False
) -> list[str]:
    """Return the names of the checks that fail."""
    with pytest.raises(AssertionError, match="violates the protocol") as caught:
        check_source(make_source, CONTENT, change=change, failing=failing_reads if fail else None)
    return [line.removeprefix("- ").partition(":")[0] for line in str(caught.value).splitlines()[1:]]


class RawErrors(RecordingSource):
    def read_at(self, offset: int, nbytes: int) -> bytes:
        try:
            return super().read_at(offset, nbytes)
        except ReadError as error:
            raise OSError(errno.EIO, "raw") from error


class CauselessErrors(RecordingSource):
    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        try:
            return super().read_into(offset, buffer, direct=direct)
        except ReadError as error:
            raise ReadError(error.problem, file=self.path) from None


class NeverRecovers(RecordingSource):
    failed: ReadError | None = None

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if self.failed:
            raise self.failed
        try:
            return super().read_at(offset, nbytes)
        except ReadError as error:
            self.failed = error
            raise


@pytest.mark.parametrize("flawed", [RawErrors, CauselessErrors, NeverRecovers])
def test_errors_of_the_system_must_be_translated(path: Path, flawed: type[RecordingSource]) -> None:
    assert failed(lambda: flawed(LocalFile(path)), fail=True) == ["failures"]


class NeverLooks(RecordingSource):
    def check_unchanged(self) -> None:
        """Check nothing."""


class TakesWhatIsThere(RecordingSource):
    """Reads the file that is at the path now."""

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > len(CONTENT):
            return super().read_at(offset, nbytes)
        return Path(self.path).read_bytes()[offset : offset + nbytes]


@pytest.mark.parametrize("flawed", [NeverLooks, TakesWhatIsThere])
def test_changes_must_be_noticed(path: Path, flawed: type[RecordingSource]) -> None:
    assert failed(lambda: flawed(LocalFile(path)), rewrite(path)) == ["changes"]


def test_all_failures_are_reported_together() -> None:
    class Hopeless(ClosesOnce, AlwaysChanged, ShortReads):
        pass

    assert {"read_into", "unchanged", "close"} <= set(failed(Hopeless))


def test_a_source_without_direct_reads_passes() -> None:
    class Plain(Flawed):
        def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
            if direct:
                raise DirectIOUnavailable(self.path)
            return self.put(offset, buffer)

    check_source(Plain, CONTENT)


def test_identities_say_which_object_it_is() -> None:
    class Moves(Flawed):
        def read_at(self, offset: int, nbytes: int) -> bytes:
            self.identity = FileIdentity(nbytes=len(CONTENT), version="2")
            return super().read_at(offset, nbytes)

    assert "identity" in failed(Moves)


class Versioned(Flawed):
    """An object in a store; its identity is its size and the version reported by the store."""

    def __init__(self, store: dict[str, str]) -> None:
        super().__init__()
        self._store = store
        self.identity = FileIdentity(nbytes=len(CONTENT), version=store["version"])

    def check_unchanged(self) -> None:
        found = replace(self.identity, version=self._store["version"])
        if found != self.identity:
            raise SourceChangedError(
                "the object changed", file=self.path, expected=self.identity.describe(), found=found.describe()
            )

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.check_unchanged()
        return super().read_at(offset, nbytes)


def test_a_source_with_versions_passes_and_is_refused_once_its_version_changes() -> None:
    store = {"version": '"e1"'}
    check_source(lambda: Versioned(store), CONTENT, change=lambda: store.update(version='"e2"'))
    source = Versioned(store)
    store["version"] = '"e3"'
    with pytest.raises(SourceChangedError) as caught:
        source.check_unchanged()
    assert "expected 30000 bytes, version '\"e2\"'; found 30000 bytes, version '\"e3\"'" in str(caught.value)
