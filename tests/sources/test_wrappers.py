"""Headers are read in few pieces, for any requests of the format."""

from __future__ import annotations

import io
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice._defaults import HEADER_PIECE_BYTES
from sluice._errors import TruncatedError
from sluice._options import Limits
from sluice.formats.detection import detect
from sluice.sources.wrappers import ReadAhead
from support.recorded_reads import RecordedRead, RecordingSource
from support.sources import MemorySource

CONTENT = random.Random(2).randbytes(5 * HEADER_PIECE_BYTES + 77)


@given(st.lists(st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 2 * HEADER_PIECE_BYTES)), max_size=12))
def test_any_reads_find_the_same_bytes(ranges: list[tuple[int, int]]) -> None:
    source = ReadAhead(MemorySource(CONTENT))
    for offset, nbytes in ranges:
        if offset + nbytes <= len(CONTENT):
            assert source.read_at(offset, nbytes) == CONTENT[offset : offset + nbytes]
        else:
            with pytest.raises(TruncatedError):
                source.read_at(offset, nbytes)


def test_what_was_read_along_is_not_read_again() -> None:
    recording = RecordingSource(MemorySource(CONTENT))
    source = ReadAhead(recording)
    end = len(CONTENT)
    for offset, nbytes in [(0, 8), (100, 30), (HEADER_PIECE_BYTES - 1, 1), (end - 22, 22), (end - 3000, 100), (5, 5)]:
        source.read_at(offset, nbytes)
    first, last = (RecordedRead(offset=at, nbytes=HEADER_PIECE_BYTES) for at in (0, end - HEADER_PIECE_BYTES))
    assert recording.reads == [first, last]


def test_large_reads_are_passed_on_unchanged() -> None:
    recording = RecordingSource(MemorySource(CONTENT))
    ReadAhead(recording).read_at(3, HEADER_PIECE_BYTES)
    assert recording.reads == [RecordedRead(offset=3, nbytes=HEADER_PIECE_BYTES)]


def test_little_is_kept() -> None:
    source = ReadAhead(MemorySource(bytes(1 << 20)))
    for offset in range(0, 1 << 20, HEADER_PIECE_BYTES):
        source.read_at(offset, 1)
    assert len(source._pieces) == 4
    source.forget(0, 1)
    assert not source._pieces


@pytest.mark.parametrize(("tensors", "nbytes", "reads"), [(1, 100, 1), (9, 100_000, 3), (150, 400, 2)])
def test_a_shard_is_indexed_in_few_reads(tensors: int, nbytes: int, reads: int) -> None:
    file = io.BytesIO()
    torch.save({f"layers.{number}.weight": torch.zeros(nbytes, dtype=torch.uint8) for number in range(tensors)}, file)
    recording = RecordingSource(MemorySource(file.getvalue()))
    source = ReadAhead(recording)
    index = detect(source).read_index(source, Limits())
    assert len(index.storages) == tensors
    assert len(recording.reads) <= reads
