"""The conformance suite of the ``Source`` protocol, independent of a test runner.

Each check opens and closes its own sources. A failing check does not stop the others.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from urllib.parse import urlsplit

from sluice._defaults import BLOCK_BYTES, SMALLEST_STAGING_BYTES
from sluice._errors import ReadError, SourceChangedError, TruncatedError
from sluice._public import public
from sluice.sources.protocol import DirectIOUnavailable, Source

__all__ = ["check_source"]

MakeSource: TypeAlias = Callable[[], Source]

#: Content must span more than two blocks, to test reads at block boundaries.
_SMALLEST_BYTES = 2 * BLOCK_BYTES + 1

#: Offsets beyond every source: the largest that a system supports, and larger ones.
_FAR_OFFSETS = (1 << 40, (1 << 63) - 1, 1 << 63, 1 << 70)

_THREADS = 8
_READS_PER_THREAD = 25

#: Byte that fills buffers before a read.
_UNTOUCHED = 0xA5


@public("sluice.testing")
def check_source(
    make_source: MakeSource,
    content: bytes,
    *,
    change: Callable[[], object] | None = None,
    failing: Callable[[], AbstractContextManager[object]] | None = None,
    pinned: bool = False,
) -> None:
    """Check that a source implements the ``Source`` protocol.

    Args:
        make_source: Opens a new source on the same content; called many times.
        content: The content: more than 8192 bytes, preferably random.
        change: Replaces the underlying object, as when a file is rewritten; called once, at the end. None for sources
            whose bytes cannot change.
        failing: Returns a context in which every read fails in the system or the server. None for sources that cannot
            fail.
        pinned: Whether every request names the version that was opened, so that the server refuses it after a change.
            ``check_unchanged`` then needs no request, and reads are expected to fail in its place.

    Raises:
        AssertionError: Checks failed; the message lists all of them with the expected behavior.
        ValueError: ``content`` is too short.

    Example:
        >>> check_source(lambda: LocalFile("f.bin"), Path("f.bin").read_bytes())
    """
    if len(content) < _SMALLEST_BYTES:
        raise ValueError(f"content must have at least {_SMALLEST_BYTES} bytes, not {len(content)}")
    case = _Case(make_source, content)
    problems: list[str] = []
    for check in _CHECKS:
        collect(check.__name__, problems, check, case)
    if failing:
        collect(_failures.__name__, problems, _failures, case, failing)
    if change:
        collect(_changes.__name__, problems, _changes, case, change, pinned)
    if problems:
        raise AssertionError("the source violates the protocol:\n" + "\n".join(problems))


@dataclass(frozen=True, slots=True)
class _Case:
    """A source and its expected content."""

    make_source: MakeSource
    content: bytes

    @property
    def end(self) -> int:
        return len(self.content)

    @contextmanager
    def opened(self) -> Iterator[Source]:
        """Open the source for the duration of the block."""
        with closing(self.make_source()) as source:
            yield source

    def ranges(self) -> list[tuple[int, int]]:
        """Return offset and size of reads inside the content, including reads at its boundaries."""
        end = self.end
        at_borders = [(0, 1), (0, end), (end - 1, 1), (1, end - 2), (BLOCK_BYTES - 1, 2), (BLOCK_BYTES, BLOCK_BYTES)]
        return at_borders + _random_ranges(end, 20, seed=0)


def _random_ranges(end: int, count: int, *, seed: int) -> list[tuple[int, int]]:
    generator = random.Random(seed)  # noqa: S311  (the same ranges every time)
    firsts = [generator.randrange(end) for _ in range(count)]
    return [(first, generator.randint(1, end - first)) for first in firsts]


def collect(name: str, problems: list[str], check: Callable[..., None], *arguments: object) -> None:
    """Run one check; append a line to ``problems`` if it raises any exception."""
    try:
        check(*arguments)
    except AssertionError as error:
        problems.append(f"- {name.strip('_')}: {error}")
    except Exception as error:  # noqa: BLE001  (any exception of the source under test is a finding)
        problems.append(f"- {name.strip('_')}: unexpected {type(error).__name__}: {error}")


def require(fulfilled: object, expected: str) -> None:
    if not fulfilled:
        raise AssertionError(expected)


def must_raise(error: type[Exception], what: str, call: Callable[[], object]) -> Exception:
    """Return the exception that the call raises, which must be of type ``error``."""
    try:
        result = call()
    except error as raised:
        return raised
    except Exception as raised:
        raise AssertionError(f"{what} must raise {error.__name__}, not {type(raised).__name__}: {raised}") from raised
    raise AssertionError(f"{what} must raise {error.__name__}, but returned {result!r:.60}")


def _read_into(source: Source, offset: int, nbytes: int) -> tuple[int, bytes]:
    """Return the number of bytes read, and the buffer, which held other bytes before."""
    data = bytearray([_UNTOUCHED]) * nbytes
    return source.read_into(offset, memoryview(data)), bytes(data)


# Checks, in the order in which they run


def _path(case: _Case) -> None:
    with case.opened() as source:
        address = urlsplit(source.path)
        require(source.path and isinstance(source.path, str), "path must be a non-empty string")
        require(not address.scheme or "@" not in address.netloc, "path must not show a user or a password")
        require("://" not in source.path or not address.query, "path must not show a query: it can hold a signature")


def _identity(case: _Case) -> None:
    with case.opened() as one, case.opened() as other:
        first = one.identity
        require(first.nbytes == case.end, f"identity.nbytes must be {case.end}, not {first.nbytes}")
        require(other.identity == first, "two sources of the same object must have the same identity")
        one.read_at(0, 1)
        require(one.identity == first, "the identity must not change after a read")


def _access(case: _Case) -> None:
    with case.opened() as source:
        access = source.access
        size, gap, parallel = access.request_bytes, access.gap_bytes, access.parallel_requests
        expected = f"a multiple of {BLOCK_BYTES} and at least {SMALLEST_STAGING_BYTES}"
        fits = size >= SMALLEST_STAGING_BYTES and not size % BLOCK_BYTES
        require(fits, f"access.request_bytes must be {expected}, not {size}")
        require(gap >= 0, f"access.gap_bytes must not be negative: {gap}")
        require(parallel >= 1, f"access.parallel_requests must be at least 1, not {parallel}")
        source.read_at(0, 1)
        require(source.access == access, "access must not change while the source is open")


def _read_at(case: _Case) -> None:
    with case.opened() as source:
        for offset, nbytes in case.ranges():
            found = source.read_at(offset, nbytes)
            what = f"read_at({offset}, {nbytes}) must return"
            require(isinstance(found, bytes), f"{what} bytes, not {type(found).__name__}")
            require(found == case.content[offset : offset + nbytes], f"{what} exactly those bytes")


def _read_at_outside(case: _Case) -> None:
    outside = [(0, case.end + 1), (case.end, 1), (case.end - 1, 2), (case.end + 1, 0), (0, 1 << 60), (-1, 2), (5, -1)]
    with case.opened() as source:
        for offset, nbytes in [*outside, *((far, 1) for far in _FAR_OFFSETS)]:
            what = f"read_at({offset}, {nbytes}) of {case.end} bytes"
            error = must_raise(TruncatedError, what, partial(source.read_at, offset, nbytes))
            named = isinstance(error, TruncatedError) and error.file == source.path and error.offset == offset
            require(named, f"the error of {what} must have the path and the offset")


def _read_into_buffer(case: _Case) -> None:
    with case.opened() as source:
        for offset, nbytes in case.ranges():
            found, data = _read_into(source, offset, nbytes)
            what = f"read_into({offset}, {nbytes} bytes) must"
            require(found == nbytes, f"{what} return {nbytes}, not {found}: reads are short only at the end")
            require(data == case.content[offset : offset + nbytes], f"{what} fill the buffer with exactly those bytes")


def _read_into_part_of_a_buffer(case: _Case) -> None:
    with case.opened() as source:
        data = bytearray([_UNTOUCHED]) * 300
        source.read_into(7, memoryview(data)[100:200])
        require(data[100:200] == case.content[7:107], "read_into must fill the buffer that it was passed")
        around = data[:100] + data[200:]
        require(around == bytes([_UNTOUCHED]) * 200, "read_into must not write outside its buffer")


def _read_into_at_the_end(case: _Case) -> None:
    with case.opened() as source:
        for inside in (1, 100, BLOCK_BYTES):
            found, data = _read_into(source, case.end - inside, inside + 50)
            require(found == inside, f"a read across the end must return the {inside} bytes before it, not {found}")
            require(data[:inside] == case.content[-inside:], "a read across the end must fill the bytes before it")
        for offset in (case.end, case.end + 1, *_FAR_OFFSETS):
            found, _ = _read_into(source, offset, 10)
            require(found == 0, f"read_into from {offset}, past the end, must return 0, not {found}")
        must_raise(TruncatedError, "read_into from a negative offset", lambda: _read_into(source, -5, 3))


def _no_bytes(case: _Case) -> None:
    with case.opened() as source:
        for offset in (0, 17, case.end):
            found, _ = _read_into(source, offset, 0)
            require(source.read_at(offset, 0) == b"", f"read_at({offset}, 0) must return no bytes")
            require(found == 0, f"read_into({offset}, no bytes) must return 0, not {found}")


def _buffer_is_not_kept(case: _Case) -> None:
    with case.opened() as source:
        data = bytearray(100)
        view = memoryview(data)
        source.read_into(0, view)
        try:
            view.release()
            data.clear()  # fails while an export of the memory exists
        except BufferError as error:
            raise AssertionError("the buffer must not be kept after read_into returns") from error


def _direct(case: _Case) -> None:
    """Check direct reads, which are optional, also of the last block."""
    last = case.end // BLOCK_BYTES * BLOCK_BYTES
    with case.opened() as source:
        for offset, nbytes in [(0, BLOCK_BYTES), (BLOCK_BYTES, 4 * BLOCK_BYTES), (last, BLOCK_BYTES)]:
            memory = mmap.mmap(-1, nbytes)  # begins at a page
            with memoryview(memory) as view:
                try:
                    found = source.read_into(offset, view, direct=True)
                except DirectIOUnavailable:
                    return
                expected = case.content[offset : offset + nbytes]
                require(found == len(expected), f"a direct read must return {len(expected)} bytes, not {found}")
                require(view[:found] == expected, "a direct read must return the same bytes as a buffered one")


def _threads(case: _Case) -> None:
    """Read different ranges of one source from several threads at the same time, with both methods."""
    wrong: list[str] = []
    begin = threading.Barrier(_THREADS)

    def work(source: Source, number: int) -> None:
        begin.wait()
        try:
            for offset, nbytes in _random_ranges(case.end, _READS_PER_THREAD, seed=number):
                expected = case.content[offset : offset + nbytes]
                if source.read_at(offset, nbytes) != expected or _read_into(source, offset, nbytes) != (
                    nbytes,
                    expected,
                ):
                    wrong.append(f"{_THREADS} threads that read at the same time must each get their own bytes")
        except Exception as error:  # noqa: BLE001  (reported in the caller's thread)
            wrong.append(f"reading from {_THREADS} threads raised {type(error).__name__}: {error}")

    with case.opened() as source:
        threads = [threading.Thread(target=work, args=(source, number)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    require(not wrong, wrong[0] if wrong else "")


def _forget(case: _Case) -> None:
    with case.opened() as source:
        for offset, nbytes in [(0, case.end), (5, 10), (0, 0), (case.end, 10)]:
            source.forget(offset, nbytes)
            require(source.read_at(0, case.end) == case.content, "forget must not change the content")


def _unchanged(case: _Case) -> None:
    with case.opened() as source:
        source.check_unchanged()
        source.read_at(0, 1)
        source.check_unchanged()
        source.close()
        source.check_unchanged()


def _close(case: _Case) -> None:
    case.make_source().close()  # a source that was never read
    with case.opened() as source:
        source.read_at(0, 1)
        source.close()
        source.close()
        require(source.read_at(3, 5) == case.content[3:8], "a closed source must reopen when it is read")


def _failures(case: _Case, failing: Callable[[], AbstractContextManager[object]]) -> None:
    with case.opened() as source:
        with failing():
            for what, call in (
                ("a failing read_at", lambda: source.read_at(11, 4)),
                ("a failing read_into", lambda: _read_into(source, 11, 4)),
            ):
                error = must_raise(ReadError, what, call)
                named = isinstance(error, ReadError) and error.file == source.path
                require(named, f"the error of {what} must have the path")
                require(error.__cause__ is not None, f"the error of {what} must be raised from the system's error")
        require(source.read_at(11, 4) == case.content[11:15], "reads must work after a failed read")


def _changes(case: _Case, change: Callable[[], object], pinned: bool) -> None:  # noqa: FBT001  (called by collect)
    with case.opened() as kept, case.opened() as closed:
        kept.read_at(0, 1)
        closed.read_at(0, 1)
        closed.close()
        change()
        if pinned:
            must_raise(SourceChangedError, "a read after a change", lambda: kept.read_at(0, case.end))
        else:
            must_raise(SourceChangedError, "check_unchanged after a change", kept.check_unchanged)
        what = "a read after close and a change"
        must_raise(SourceChangedError, what, lambda: closed.read_at(0, 1))


_CHECKS: tuple[Callable[[_Case], None], ...] = (
    _path,
    _identity,
    _access,
    _read_at,
    _read_at_outside,
    _read_into_buffer,
    _read_into_part_of_a_buffer,
    _read_into_at_the_end,
    _no_bytes,
    _buffer_is_not_kept,
    _direct,
    _threads,
    _forget,
    _unchanged,
    _close,
)
