"""Pickles inside a larger file: their end, the windows of reading, and the bounds."""

from __future__ import annotations

import pickle

import pytest

from sluice._errors import FormatError, LimitError, TruncatedError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import unpickle_at
from sluice.formats.torch_save.allowlist import TorchAllowlist
from support.recorded_reads import RecordingSource
from support.sources import MemorySource

PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3, 4, 5])


def allowlist() -> TorchAllowlist:
    return TorchAllowlist(Limits(), 1 << 20)


@PROTOCOLS
def test_pickles_one_after_the_other(protocol: int) -> None:
    values = [{"a": 1}, "x" * 10_000, list(range(5000)), None]
    parts = [pickle.dumps(value, protocol) for value in values]
    source = MemorySource(b"head" + b"".join(parts) + b"tail")
    end = 4
    for value, part in zip(values, parts, strict=True):
        start = end
        found, unpickler, end = unpickle_at(source, start, allowlist(), Limits())
        assert found == value
        assert end == start + len(part)
        assert unpickler.refusal is None


@PROTOCOLS
def test_a_short_pickle_is_one_read_of_one_small_window(protocol: int) -> None:
    source = RecordingSource(MemorySource(pickle.dumps(7, protocol) + bytes(1 << 20)))
    assert unpickle_at(source, 0, allowlist(), Limits()).value == 7
    assert [(read.offset, read.nbytes) for read in source.reads] == [(0, 4096)]


@PROTOCOLS
def test_at_most_the_length_of_the_pickle_and_a_frame_are_read_beyond_its_end(protocol: int) -> None:
    part = pickle.dumps(list(range(100_000)), protocol)
    source = RecordingSource(MemorySource(part + bytes(4 << 20)))
    assert unpickle_at(source, 0, allowlist(), Limits()).end == len(part)
    assert max(read.offset + read.nbytes for read in source.reads) <= 2 * len(part) + (64 << 10)


def test_the_header_limit_bounds_the_length() -> None:
    content = pickle.dumps(list(range(10_000)), 2)
    assert unpickle_at(MemorySource(content), 0, allowlist(), Limits(header_bytes=len(content))).end == len(content)
    with pytest.raises(LimitError, match="header_bytes") as caught:
        unpickle_at(MemorySource(b"12345" + content), 5, allowlist(), Limits(header_bytes=len(content) - 1))
    assert caught.value.offset == 5


def test_offsets_in_errors_count_from_the_start_of_the_file() -> None:
    with pytest.raises(TruncatedError, match="where a pickle should start") as caught:
        unpickle_at(MemorySource(b"1234567"), 7, allowlist(), Limits())
    assert caught.value.offset == 7
    with pytest.raises(FormatError, match="not a pickle") as wrong:
        unpickle_at(MemorySource(b"1234567"), 3, allowlist(), Limits())
    assert wrong.value.offset == 3
    long = b"\x80\x02](" + b"K\x01" * 10_000  # the data ends before STOP, in a later window
    with pytest.raises(TruncatedError) as short:
        unpickle_at(MemorySource(b"123" + long), 3, allowlist(), Limits())
    assert short.value.offset == 3 + len(long)
