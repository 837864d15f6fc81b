"""Remote objects as sources, over an object in memory: first bytes, resumed and slow bodies, and ranges to check."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice import _defaults as defaults
from sluice._errors import FormatError, RemoteError
from sluice.records import AccessFacts
from sluice.sources.protocol import Source
from sluice.sources.remote.file import RemoteFile, remote_access
from sluice.sources.remote.protocol import PieceBody
from support.cached_objects import VersionedObject

CONTENT = bytes(range(251)) * 4000


def read(source: Source, offset: int, nbytes: int) -> bool:
    """Return whether a read brings the right bytes."""
    data = bytearray(nbytes)
    return source.read_into(offset, memoryview(data)) == nbytes and data == CONTENT[offset : offset + nbytes]


def opened(memory: VersionedObject) -> RemoteFile:
    return RemoteFile(memory, sleep=memory.time.sleep, clock=memory.time)


def test_bodies_are_resumed_and_pieces_joined() -> None:
    memory = VersionedObject(CONTENT, longest=70_000, piece=999)
    file = opened(memory)
    assert file.read_at(100, 200_000) == CONTENT[100:200_100]
    assert memory.requests == [(0, 65536), (65536, 134_564), (135_536, 64_564)]


def test_first_bytes_that_are_fewer_are_requested_later() -> None:
    memory = VersionedObject(CONTENT, longest=10)
    file = opened(memory)
    memory.longest = 1 << 30
    assert file.read_at(0, 100) == CONTENT[:100]
    assert memory.requests[1:] == [(10, 90)]


def test_the_first_bytes_are_released_by_close() -> None:
    memory = VersionedObject(CONTENT)
    file = opened(memory)
    file.close()
    assert file.read_at(5, 10) == CONTENT[5:15]
    assert memory.requests[1:] == [(5, 10)]


def test_the_first_bytes_of_few_files_are_kept() -> None:
    memory = VersionedObject(CONTENT)
    files = [opened(memory) for _ in range(defaults.REMOTE_FIRST_BYTES_KEPT + 1)]
    memory.requests.clear()
    assert {file.read_at(0, 10) for file in files} == {CONTENT[:10]}
    assert memory.requests == [(0, 10)]


def test_the_opening_request_is_repeated() -> None:
    memory = VersionedObject(CONTENT)
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
    memory = VersionedObject(CONTENT)
    memory.seconds_per_piece = seconds
    file = RemoteFile(memory, access=remote_access(connections), clock=memory.time)
    assert file.access.request_bytes == mib << 20


def test_a_trickle_is_given_up_in_opening_and_in_reading() -> None:
    memory = VersionedObject(CONTENT, piece=100)
    file = opened(memory)
    memory.seconds_per_piece = 1.0
    with pytest.raises(RemoteError, match=r"less than 4\.00 KiB/s"):
        file.read_at(100_000, 100_000)
    assert memory.time.now - 1000 <= defaults.REMOTE_PATIENCE_SECONDS + defaults.REMOTE_SLOW_SECONDS
    with pytest.raises(RemoteError, match=r"less than 4\.00 KiB/s"):
        opened(memory)


def test_reads_of_a_range_share_a_request_and_gaps_are_skipped() -> None:
    memory = VersionedObject(CONTENT, piece=50_000)
    file = opened(memory)
    memory.requests.clear()
    with file.request(70_000, 600_000) as shared:
        assert [read(shared, 70_000, 10), read(shared, 70_010, 90_000)] == [True, True]
        assert read(shared, 400_000, 200_000)
    assert memory.requests == [(70_000, 600_000)]
    assert file.traffic == (2, 65_536 + 530_000)


def test_a_shared_request_is_resumed_where_it_broke() -> None:
    memory = VersionedObject(CONTENT, longest=100_000)
    file = opened(memory)
    memory.requests.clear()
    with file.request(100_000, 300_000) as shared:
        assert all(read(shared, start, 60_000) for start in range(100_000, 400_000, 60_000))
    assert memory.requests == [(100_000, 300_000), (200_000, 200_000), (300_000, 100_000)]


def test_what_is_not_in_order_takes_a_request_of_its_own() -> None:
    memory = VersionedObject(CONTENT)
    file = opened(memory)
    memory.requests.clear()
    with file.request(200_000, 100_000) as shared:
        assert read(shared, 250_000, 10)
        assert read(shared, 240_000, 10)
        assert read(shared, 299_995, 10)
        assert read(shared, 250_010, 10)
    assert memory.requests == [(200_000, 100_000), (240_000, 10), (299_995, 10)]


def test_time_between_the_reads_of_a_request_is_not_that_of_the_server() -> None:
    memory = VersionedObject(CONTENT, piece=1_000)
    file = opened(memory)
    with file.request(100_000, 200_000) as shared:
        for start in range(100_000, 300_000, 1_000):
            memory.time.now += 10 * defaults.REMOTE_SLOW_SECONDS
            assert read(shared, start, 1_000)


def test_a_range_in_front_of_data_is_checked_within_a_shared_request() -> None:
    memory = VersionedObject(CONTENT)
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


def test_pieces_of_any_size_fill_buffers_of_any_size() -> None:
    with PieceBody(iter([b"ab", b"", b"cdefg", b""])) as body:
        found = []
        while (count := body.readinto(buffer := memoryview(bytearray(3)))) > 0:
            found.append(bytes(buffer[:count]))
    assert found == [b"ab", b"cde", b"fg"]
    assert not body.readinto(memoryview(bytearray(3)))


#: Offset, bytes and data bytes of ranges.
RANGES = [(100, 50, 1000), (70_000, 80, 100_000), (170_080, 10, 200_000)]

#: Each range is a request of its own: reads are not joined.
ACCESS = AccessFacts(request_bytes=1 << 20, gap_bytes=0, parallel_requests=4)


def expecting(check: Callable[[int, bytes], None]) -> tuple[RemoteFile, VersionedObject]:
    remote = VersionedObject(CONTENT)
    file = RemoteFile(remote, access=ACCESS)
    remote.requests.clear()
    for offset, nbytes, data_bytes in RANGES:
        file.expect(offset, nbytes, data_bytes, lambda raw, at=offset: check(at, raw))  # type: ignore[misc]
    return file, remote


class Seen(list[int]):
    """Offsets of the ranges that were checked; each has the right bytes."""

    def __call__(self, at: int, raw: bytes) -> None:
        nbytes = next(nbytes for offset, nbytes, _ in RANGES if offset == at)
        assert raw == CONTENT[at : at + nbytes]
        self.append(at)


def test_a_range_comes_with_the_request_for_the_data() -> None:
    seen = Seen()
    file, remote = expecting(seen)
    assert file.read_at(70_080, 100_000) == CONTENT[70_080:170_080]
    assert file.read_at(170_190, 300) == CONTENT[170_190:170_490]  # not quite the first of the data
    assert remote.requests == [(70_000, 100_080), (170_080, 410)]
    assert file.read_at(150, 1000) == CONTENT[150:1150]
    assert file.read_at(70_080, 5) == CONTENT[70_080:70_085]
    assert seen == [70_000, 170_080, 100]
    assert remote.requests[2:] == [(70_080, 5)]
    file.check_unchanged()
    assert len(remote.requests) == 3


def test_a_range_far_from_what_was_read_is_checked_at_the_end() -> None:
    seen = Seen()
    file, remote = expecting(seen)
    file.read_at(300_000, 10)
    assert remote.requests == [(300_000, 10)]
    assert seen == []
    file.check_unchanged()
    assert remote.requests[1:] == [(170_080, 10)]  # no data after the others was read
    assert seen == [170_080]


@pytest.mark.parametrize(("offset", "nbytes"), [(70_080, 5), (70_000, 90), (71_000, 5), (60_000, 20_000)])
def test_a_read_fails_if_the_check_does(offset: int, nbytes: int) -> None:
    file, _ = expecting(Mock(side_effect=FormatError("no")))
    with pytest.raises(FormatError, match="no"):
        file.read_at(offset, nbytes)


@given(st.lists(st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 90_000)), max_size=6))
def test_any_reads_have_the_right_bytes_and_leave_nothing_unchecked(reads: list[tuple[int, int]]) -> None:
    seen = Seen()
    file, _ = expecting(seen)
    needed = set()
    for offset, most in reads:
        nbytes = min(most, len(CONTENT) - offset)
        assert file.read_at(offset, nbytes) == CONTENT[offset : offset + nbytes]
        needed |= {
            start
            for start, size, data in RANGES
            if nbytes and max(offset, start + size) < min(offset + nbytes, start + size + data)
        }
    file.check_unchanged()
    assert needed <= set(seen)
