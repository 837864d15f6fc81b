"""Remote objects as sources, over an object in memory: the first bytes, resumed bodies, slow ones, and closing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from sluice import _defaults as defaults
from sluice._errors import RemoteError, TruncatedError
from sluice.sources.protocol import Source
from sluice.sources.remote.file import RemoteFile, remote_access
from sluice.sources.remote.protocol import Body, ObjectFacts, RequestFailedError
from support.cached_objects import pieces_of

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
        arrived = lambda: self.sleep(self.seconds_per_piece)  # noqa: E731
        yield pieces_of(self.content[offset : offset + nbytes][: self.longest], self.piece, arrived)

    def close(self) -> None:
        self.closed += 1

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def opened(memory: Memory) -> RemoteFile:
    return RemoteFile(memory, sleep=memory.sleep, clock=lambda: memory.now)


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
    files = [opened(memory) for _ in range(defaults.REMOTE_FIRST_BYTES_KEPT + 1)]
    memory.requests.clear()
    assert {file.read_at(0, 10) for file in files} == {CONTENT[:10]}
    assert memory.requests == [(0, 10)]


def test_the_opening_request_is_repeated() -> None:
    memory = Memory()
    memory.failures = 3
    assert opened(memory).read_at(0, 5) == CONTENT[:5]
    memory.failures = 1000
    with pytest.raises(RemoteError, match=r"no after \d+ tries in 120 s"):
        opened(memory)
    assert memory.closed == 1


@pytest.mark.parametrize(
    ("seconds", "connections", "mib"),
    [(0.0, 16, 8), (0.05, 16, 8), (0.2, 16, 16), (0.05, 8, 16), (0.2, 8, 32), (5.0, 16, 32), (0.2, 1, 32)],
)
def test_the_other_connections_last_for_the_latency_of_the_opening(seconds: float, connections: int, mib: int) -> None:
    memory = Memory()
    memory.seconds_per_piece = seconds
    file = RemoteFile(memory, access=remote_access(connections), clock=lambda: memory.now)
    assert file.access.request_bytes == mib << 20


def test_an_empty_object() -> None:
    memory = Memory(b"")
    with pytest.raises(TruncatedError, match="empty"):
        opened(memory)
    assert memory.closed == 1


def test_bodies_that_end_at_once_are_given_up() -> None:
    memory = Memory()
    file = opened(memory)
    memory.longest = 0
    with pytest.raises(RemoteError, match=r"ended too early after \d+ tries in 120 s"):
        file.read_at(0, len(CONTENT))


def test_a_trickle_is_given_up_in_opening_and_in_reading() -> None:
    memory = Memory(piece=100)
    file = opened(memory)
    memory.seconds_per_piece = 1.0
    with pytest.raises(RemoteError, match=r"less than 4\.00 KiB/s"):
        file.read_at(100_000, 100_000)
    assert memory.now <= defaults.REMOTE_PATIENCE_SECONDS + defaults.REMOTE_SLOW_SECONDS
    with pytest.raises(RemoteError, match=r"less than 4\.00 KiB/s"):
        opened(memory)


def test_reads_of_a_range_share_a_request_and_gaps_are_skipped() -> None:
    memory = Memory(piece=50_000)
    file = opened(memory)
    memory.requests.clear()
    with file.request(70_000, 600_000) as shared:
        assert [read(shared, 70_000, 10), read(shared, 70_010, 90_000)] == [True, True]
        assert read(shared, 400_000, 200_000)
    assert memory.requests == [(70_000, 600_000)]
    assert file.traffic == (2, 65_536 + 530_000)


def test_a_shared_request_is_resumed_where_it_broke() -> None:
    memory = Memory(longest=100_000)
    file = opened(memory)
    memory.requests.clear()
    with file.request(100_000, 300_000) as shared:
        assert all(read(shared, start, 60_000) for start in range(100_000, 400_000, 60_000))
    assert memory.requests == [(100_000, 300_000), (200_000, 200_000), (300_000, 100_000)]


def test_what_is_not_in_order_takes_a_request_of_its_own() -> None:
    memory = Memory()
    file = opened(memory)
    memory.requests.clear()
    with file.request(200_000, 100_000) as shared:
        assert read(shared, 250_000, 10)
        assert read(shared, 240_000, 10)
        assert read(shared, 299_995, 10)
        assert read(shared, 250_010, 10)
    assert memory.requests == [(200_000, 100_000), (240_000, 10), (299_995, 10)]


def test_the_first_bytes_take_no_shared_request() -> None:
    memory = Memory()
    file = opened(memory)
    with file.request(0, 60_000) as shared:
        assert read(shared, 10, 50)
    assert memory.requests == [(0, 65_536)]


def test_time_between_the_reads_of_a_request_is_not_that_of_the_server() -> None:
    memory = Memory(piece=1_000)
    file = opened(memory)
    with file.request(100_000, 200_000) as shared:
        for start in range(100_000, 300_000, 1_000):
            memory.now += 10 * defaults.REMOTE_SLOW_SECONDS
            assert read(shared, start, 1_000)


def test_a_range_in_front_of_data_is_checked_within_a_shared_request() -> None:
    memory = Memory()
    file = opened(memory)
    seen: list[bytes] = []
    for start in (100_000, 200_000, 300_000):
        file.expect(start, 30, 50_000, seen.append)
    with file.request(100_030, 250_000) as shared:
        assert read(shared, 100_030, 50_000)
        assert read(shared, 200_030, 50_000)
        assert read(shared, 300_030, 50_000)
    assert seen == [CONTENT[start : start + 30] for start in (100_000, 200_000, 300_000)]
    assert memory.requests[1:] == [(100_000, 250_030)]


def read(source: Source, offset: int, nbytes: int) -> bool:
    """Return whether a read brings the right bytes."""
    data = bytearray(nbytes)
    return source.read_into(offset, memoryview(data)) == nbytes and data == CONTENT[offset : offset + nbytes]
