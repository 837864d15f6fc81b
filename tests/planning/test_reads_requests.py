"""Reads of remote files that follow each other are joined to requests."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.planning.reads import join_requests
from sluice.records import AccessFacts, FileFacts, Read, local_access, requests_of

REMOTE = AccessFacts(request_bytes=1000, gap_bytes=50, parallel_requests=4, joins_reads=True)


def facts(*accesses: AccessFacts) -> list[FileFacts]:
    return [FileFacts(filesystem="", direct_io=False, probe_step_bytes=1, access=access) for access in accesses]


@st.composite
def reads(draw: st.DrawFn) -> list[Read]:
    made: list[Read] = []
    for file in range(draw(st.integers(1, 3))):
        offset = 0
        for _ in range(draw(st.integers(0, 12))):
            offset += draw(st.sampled_from([0, 0, 7, 50, 51]))
            nbytes = draw(st.sampled_from([1, 100, 450, 1000]))
            made.append(Read(file=file, offset=offset, nbytes=nbytes, methods=("buffered",)))
            offset += nbytes
    return made


@given(reads())
def test_requests_are_as_long_as_they_may_be(each: list[Read]) -> None:
    joined = list(join_requests(each, facts(REMOTE, REMOTE, REMOTE)))
    assert [replace(read, continues=False) for read in joined] == each
    requests = list(requests_of(joined))
    for request in requests:
        assert len({read.file for read in request}) == 1
        gaps = [after.offset - read.offset - read.nbytes for read, after in itertools.pairwise(request)]
        assert all(gap <= 50 for gap in gaps)
        assert request[-1].offset + request[-1].nbytes - request[0].offset <= 1000
    for request, (after, *_) in itertools.pairwise(requests):
        gap = after.offset - request[-1].offset - request[-1].nbytes
        too_long = after.offset + after.nbytes - request[0].offset > 1000
        assert after.file != request[0].file or gap > 50 or too_long


@given(reads())
def test_reads_of_local_files_stay_apart(each: list[Read]) -> None:
    assert list(join_requests(each, facts(local_access(), local_access(), local_access()))) == each
