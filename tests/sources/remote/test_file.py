"""Remote objects as sources, over an object in memory: the first bytes, resumed bodies, slow ones, and closing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from sluice import _options as options
from sluice._errors import RemoteError, TruncatedError
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.protocol import Body, ObjectFacts, RequestFailedError

CONTENT = bytes(range(251)) * 4000


class Memory:
    """An object in memory whose bodies have at most ``longest`` bytes, and bring ``piece`` of them at a time."""

    path = "memory"

    def __init__(self, content: bytes = CONTENT, *, longest: int = 1 << 30, piece: int = 1 << 30) -> None:
        self.content, self.longest, self.piece = content, longest, piece
        self.requests: list[tuple[int, int]] = []
        self.now = 0.0
        self.seconds_per_piece = 0.0
        self.failures = 0
        self.closed = 0

    def open_first(self, nbytes: int) -> tuple[ObjectFacts, AbstractContextManager[Body]]:
        facts = ObjectFacts(nbytes=len(self.content), weak_version="W")
        return facts, self.open_range(0, min(nbytes, len(self.content)), facts)

    @contextmanager
    def open_range(self, offset: int, nbytes: int, _facts: ObjectFacts) -> Iterator[Body]:
        self.requests.append((offset, nbytes))
        if self.failures:
            self.failures -= 1
            raise RequestFailedError("no", temporary=True)
        left = self.content[offset : offset + nbytes][: self.longest]
        memory = self

        class Bytes:
            def readinto(self, buffer: memoryview) -> int:
                nonlocal left
                memory.now += memory.seconds_per_piece
                some = left[: min(len(buffer), memory.piece)]
                buffer[: len(some)] = some
                left = left[len(some) :]
                return len(some)

        yield Bytes()

    def close(self) -> None:
        self.closed += 1


def opened(memory: Memory) -> RemoteFile:
    return RemoteFile(memory, sleep=lambda _: None, clock=lambda: memory.now)


def test_bodies_are_resumed_and_pieces_joined() -> None:
    memory = Memory(longest=70_000, piece=999)
    file = opened(memory)
    assert file.read_at(100, 200_000) == CONTENT[100:200_100]
    assert memory.requests == [(0, 65536), (65536, 134_564), (135_536, 64_564)]
    assert file.identity.version == "W"


def test_first_bytes_that_are_fewer_are_requested_later() -> None:
    memory = Memory(longest=10)
    file = opened(memory)
    memory.longest = 1 << 30
    assert file.read_at(0, 100) == CONTENT[:100]
    assert memory.requests[1:] == [(10, 90)]


def test_the_first_bytes_are_released_by_close() -> None:
    memory = Memory()
    file = opened(memory)
    file.close()
    assert file.read_at(5, 10) == CONTENT[5:15]
    assert memory.requests[1:] == [(5, 10)]


def test_the_first_bytes_of_few_files_are_kept() -> None:
    memory = Memory()
    files = [opened(memory) for _ in range(options.REMOTE_FIRST_BYTES_KEPT + 1)]
    memory.requests.clear()
    assert {file.read_at(0, 10) for file in files} == {CONTENT[:10]}
    assert memory.requests == [(0, 10)]


def test_the_opening_request_is_repeated() -> None:
    memory = Memory()
    memory.failures = 3
    assert opened(memory).read_at(0, 5) == CONTENT[:5]
    memory.failures = 100
    with pytest.raises(RemoteError, match="no after 7 tries"):
        opened(memory)
    assert memory.closed == 1


def test_an_empty_object() -> None:
    memory = Memory(b"")
    with pytest.raises(TruncatedError, match="empty"):
        opened(memory)
    assert memory.closed == 1


def test_bodies_that_end_at_once_are_given_up() -> None:
    memory = Memory(longest=options.REMOTE_PROGRESS_BYTES - 1)
    file = opened(memory)
    with pytest.raises(RemoteError, match="ended too early after 7 tries"):
        file.read_at(0, len(CONTENT))


def test_a_trickle_is_given_up_in_opening_and_in_reading() -> None:
    memory = Memory(piece=100)
    file = opened(memory)
    memory.seconds_per_piece = 1.0
    with pytest.raises(RemoteError, match=r"less than 4\.00 KiB/s"):
        file.read_at(100_000, 100_000)
    assert memory.now <= options.REMOTE_PATIENCE_SECONDS + options.REMOTE_SLOW_SECONDS
    with pytest.raises(RemoteError, match=r"less than 4\.00 KiB/s"):
        opened(memory)
