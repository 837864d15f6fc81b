"""Ranges that are checked with the data after them: in the same request, or at the end."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._errors import FormatError
from sluice.records import AccessFacts
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.protocol import PieceBody
from support.cached_objects import VersionedObject


def test_pieces_of_any_size_fill_buffers_of_any_size() -> None:
    with PieceBody(iter([b"ab", b"", b"cdefg", b""])) as body:
        found = []
        while (count := body.readinto(buffer := memoryview(bytearray(3)))) > 0:
            found.append(bytes(buffer[:count]))
    assert found == [b"ab", b"cde", b"fg"]
    assert not body.readinto(memoryview(bytearray(3)))


CONTENT = random.Random(1).randbytes(400_000)

#: Offset, bytes and data bytes of ranges.
RANGES = [(100, 50, 1000), (70_000, 80, 100_000), (170_080, 10, 200_000)]

#: Each range is a request of its own: reads are not joined.
ACCESS = AccessFacts(request_bytes=1 << 20, gap_bytes=0, parallel_requests=4)


def opened(check: Callable[[int, bytes], None]) -> tuple[RemoteFile, VersionedObject]:
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


def refuse(_at: int, _raw: bytes) -> None:
    raise FormatError("no")


def test_a_range_comes_with_the_request_for_the_data() -> None:
    seen = Seen()
    file, remote = opened(seen)
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
    file, remote = opened(seen)
    file.read_at(300_000, 10)
    assert remote.requests == [(300_000, 10)]
    assert seen == []
    file.check_unchanged()
    assert remote.requests[1:] == [(170_080, 10)]  # no data after the others was read
    assert seen == [170_080]


@pytest.mark.parametrize(("offset", "nbytes"), [(70_080, 5), (70_000, 90), (71_000, 5), (60_000, 20_000)])
def test_a_read_fails_if_the_check_does(offset: int, nbytes: int) -> None:
    file, _ = opened(refuse)
    with pytest.raises(FormatError, match="no"):
        file.read_at(offset, nbytes)


def test_the_check_at_the_end_fails_too() -> None:
    file, _ = opened(refuse)
    file.read_at(300_000, 10)
    with pytest.raises(FormatError, match="no"):
        file.check_unchanged()


@given(st.lists(st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 90_000)), max_size=6))
def test_any_reads_have_the_right_bytes_and_leave_nothing_unchecked(reads: list[tuple[int, int]]) -> None:
    seen = Seen()
    file, _ = opened(seen)
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
