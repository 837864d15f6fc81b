"""The conformance suite of the ``Source`` protocol. Each check has an open source of its own."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from functools import partial
from urllib.parse import urlsplit

import pytest

from sluice._defaults import BLOCK_BYTES, SMALLEST_STAGING_BYTES
from sluice._errors import ReadError, SourceChangedError, TruncatedError
from sluice.sources.protocol import DirectIOUnavailable, Source

#: Offsets beyond every source: the largest that a system supports, and larger ones.
_FAR_OFFSETS = (1 << 40, (1 << 63) - 1, 1 << 63, 1 << 70)

_THREADS = 8

#: Byte that fills buffers before a read.
_UNTOUCHED = 0xA5


def check_source(
    make_source: Callable[[], Source],
    content: bytes,
    *,
    change: Callable[[], object] | None = None,
    failing: Callable[[], AbstractContextManager[object]] | None = None,
    pinned: bool = False,
) -> None:
    """Assert that a source keeps the protocol.

    Args:
        make_source: Opens a new source on the same content; called many times.
        content: The content: more than 8192 bytes, to test reads at block boundaries; preferably random.
        change: Replaces the underlying object, as when a file is rewritten; called once, at the end. None for sources
            whose bytes cannot change.
        failing: Returns a context in which every read fails in the system or the server. None for sources that cannot
            fail.
        pinned: Whether every request names the version that was opened, so that the server refuses it after a change.
            ``check_unchanged`` then needs no request, and reads are expected to fail in its place.
    """
    assert len(content) > 2 * BLOCK_BYTES
    reads = (_read_at, _read_at_outside, _read_into, _at_the_end, _no_bytes, _buffer_is_not_kept, _direct, _threads)
    for check in (_path, _access, *reads, _forget, _unchanged, _close):
        with closing(make_source()) as source:
            check(source, content)
    with closing(make_source()) as one, closing(make_source()) as other:
        assert other.identity == one.identity
        assert one.identity.nbytes == len(content)
        one.read_at(0, 1)
        assert one.identity == other.identity
    if failing:
        _failures(make_source(), content, failing)
    if change:
        _changes(make_source, content, change, pinned=pinned)


def _random_ranges(end: int, count: int, *, seed: int) -> list[tuple[int, int]]:
    generator = random.Random(seed)
    firsts = [generator.randrange(end) for _ in range(count)]
    return [(first, generator.randint(1, end - first)) for first in firsts]


def _ranges(end: int) -> list[tuple[int, int]]:
    """Return offset and size of reads inside the content, including reads at its boundaries."""
    at_borders = [(0, 1), (0, end), (end - 1, 1), (1, end - 2), (BLOCK_BYTES - 1, 2), (BLOCK_BYTES, BLOCK_BYTES)]
    return at_borders + _random_ranges(end, 20, seed=0)


def _into(source: Source, offset: int, nbytes: int) -> tuple[int, bytes]:
    """Return the number of bytes read, and the buffer, which held other bytes before."""
    data = bytearray([_UNTOUCHED]) * nbytes
    return source.read_into(offset, memoryview(data)), bytes(data)


def _path(source: Source, _: bytes) -> None:
    address = urlsplit(source.path)
    assert source.path
    assert not address.scheme or "@" not in address.netloc, "no user and no password"
    assert "://" not in source.path or not address.query, "a query can hold a signature"


def _access(source: Source, _: bytes) -> None:
    access = source.access
    assert access.request_bytes >= SMALLEST_STAGING_BYTES
    assert access.request_bytes % BLOCK_BYTES == 0
    assert access.gap_bytes >= 0
    assert access.parallel_requests >= 1
    source.read_at(0, 1)
    assert source.access == access


def _read_at(source: Source, content: bytes) -> None:
    for offset, nbytes in _ranges(len(content)):
        found = source.read_at(offset, nbytes)
        assert isinstance(found, bytes)
        assert found == content[offset : offset + nbytes], (offset, nbytes)


def _read_at_outside(source: Source, content: bytes) -> None:
    end = len(content)
    outside = [(0, end + 1), (end, 1), (end - 1, 2), (end + 1, 0), (0, 1 << 60), (-1, 2), (5, -1)]
    for offset, nbytes in [*outside, *((far, 1) for far in _FAR_OFFSETS)]:
        with pytest.raises(TruncatedError) as caught:
            source.read_at(offset, nbytes)
        assert (caught.value.file, caught.value.offset) == (source.path, offset)


def _read_into(source: Source, content: bytes) -> None:
    for offset, nbytes in _ranges(len(content)):
        assert _into(source, offset, nbytes) == (nbytes, content[offset : offset + nbytes]), (offset, nbytes)
    part = bytearray([_UNTOUCHED]) * 300
    source.read_into(7, memoryview(part)[100:200])
    assert part == bytes([_UNTOUCHED]) * 100 + content[7:107] + bytes([_UNTOUCHED]) * 100


def _at_the_end(source: Source, content: bytes) -> None:
    end = len(content)
    for inside in (1, 100, BLOCK_BYTES):
        found, data = _into(source, end - inside, inside + 50)
        assert (found, data[:inside]) == (inside, content[-inside:])
    for offset in (end, end + 1, *_FAR_OFFSETS):
        assert _into(source, offset, 10)[0] == 0, offset
    with pytest.raises(TruncatedError):
        _into(source, -5, 3)


def _no_bytes(source: Source, content: bytes) -> None:
    for offset in (0, 17, len(content)):
        assert (source.read_at(offset, 0), _into(source, offset, 0)[0]) == (b"", 0)


def _buffer_is_not_kept(source: Source, _: bytes) -> None:
    data = bytearray(100)
    with memoryview(data) as view:
        source.read_into(0, view)
    data.clear()  # fails while an export of the memory exists


def _direct(source: Source, content: bytes) -> None:
    """Direct reads are optional; they read the last block too."""
    last = len(content) // BLOCK_BYTES * BLOCK_BYTES
    for offset, nbytes in [(0, BLOCK_BYTES), (BLOCK_BYTES, 4 * BLOCK_BYTES), (last, BLOCK_BYTES)]:
        with memoryview(mmap.mmap(-1, nbytes)) as view:  # begins at a page
            try:
                found = source.read_into(offset, view, direct=True)
            except DirectIOUnavailable:
                return
            assert view[:found] == content[offset : offset + nbytes]


def _threads(source: Source, content: bytes) -> None:
    begin = threading.Barrier(_THREADS)

    def work(number: int) -> None:
        begin.wait()
        for offset, nbytes in _random_ranges(len(content), 25, seed=number):
            expected = content[offset : offset + nbytes]
            assert source.read_at(offset, nbytes) == expected
            assert _into(source, offset, nbytes) == (nbytes, expected)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(work, range(_THREADS)))


def _forget(source: Source, content: bytes) -> None:
    end = len(content)
    for offset, nbytes in [(0, end), (5, 10), (0, 0), (end, 10)]:
        source.forget(offset, nbytes)
        assert source.read_at(0, end) == content


def _unchanged(source: Source, _: bytes) -> None:
    source.check_unchanged()
    source.read_at(0, 1)
    source.check_unchanged()
    source.close()
    source.check_unchanged()


def _close(source: Source, content: bytes) -> None:
    source.close()  # it was never read
    source.read_at(0, 2)  # s3rver takes a range of one byte at 0 for no range
    source.close()
    source.close()
    assert source.read_at(3, 5) == content[3:8], "a closed source reopens when it is read"


def _failures(source: Source, content: bytes, failing: Callable[[], AbstractContextManager[object]]) -> None:
    with closing(source):
        for call in (partial(source.read_at, 11, 4), partial(_into, source, 11, 4)):
            with failing(), pytest.raises(ReadError) as caught:
                call()
            assert caught.value.file == source.path
            assert caught.value.__cause__ is not None, "the error of the system"
        assert source.read_at(11, 4) == content[11:15], "reads work after a failed one"


def _changes(make_source: Callable[[], Source], content: bytes, change: Callable[[], object], *, pinned: bool) -> None:
    with closing(make_source()) as kept, closing(make_source()) as closed:
        kept.read_at(0, 1)
        closed.read_at(0, 1)
        closed.close()
        change()
        with pytest.raises(SourceChangedError):
            kept.read_at(0, len(content)) if pinned else kept.check_unchanged()
        with pytest.raises(SourceChangedError):
            closed.read_at(0, 1)
