"""The conformance suite of the ``Source`` protocol, independent of a test runner.

Each check has an open source of its own. A failing check does not stop the others.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from urllib.parse import urlsplit

from sluice._defaults import BLOCK_BYTES, SMALLEST_STAGING_BYTES
from sluice._errors import ReadError, SluiceError, SourceChangedError, TruncatedError
from sluice.sources.protocol import DirectIOUnavailable, Source

__all__ = ["check_source"]

MakeSource: TypeAlias = Callable[[], Source]

#: Content must span more than two blocks, to test reads at block boundaries.
_SMALLEST_BYTES = 2 * BLOCK_BYTES + 1

#: Offsets beyond every source: the largest that a system supports, and larger ones.
_FAR_OFFSETS = (1 << 40, (1 << 63) - 1, 1 << 63, 1 << 70)

_THREADS = 8

#: Byte that fills buffers before a read.
_UNTOUCHED = 0xA5


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
    """
    if len(content) < _SMALLEST_BYTES:
        raise ValueError(f"content must have at least {_SMALLEST_BYTES} bytes, not {len(content)}")
    case = _Case(make_source, content)
    checks: list[Callable[[Source], None]] = [
        *(case.path, case.identity, case.access, case.read_at, case.read_at_outside),
        *(case.read_into, case.read_into_at_the_end, case.no_bytes, case.buffer_is_not_kept, case.direct),
        *(case.threads, case.forget, case.unchanged, case.close),
    ]
    if failing:
        checks.append(partial(case.failures, failing))
    if change:
        checks.append(partial(case.changes, change, pinned))

    def run(check: Callable[[Source], None]) -> None:
        with closing(make_source()) as source:
            check(source)

    run_checks("the source violates the protocol", run, checks)


def run_checks(title: str, run: Callable[[Callable[..., None]], None], checks: Iterable[Callable[..., None]]) -> None:
    """Run all checks.

    Raises:
        AssertionError: Some failed, or raised any other exception; the message has a line for each.
    """
    problems = [title + ":"]
    for check in checks:
        name = getattr(check, "func", check).__name__
        try:
            run(check)
        except AssertionError as error:
            problems.append(f"- {name}: {error}")
        except Exception as error:  # noqa: BLE001  (any exception of the object under test is a finding)
            problems.append(f"- {name}: unexpected {type(error).__name__}: {error}")
    if len(problems) > 1:
        raise AssertionError("\n".join(problems))


def require(fulfilled: object, expected: str) -> None:
    if not fulfilled:
        raise AssertionError(expected)


def must_raise(
    error: type[SluiceError], what: str, call: Callable[[], object], *, file: str | None = None
) -> SluiceError:
    """Return the exception that the call raises, which must be of type ``error`` and name the file, if one is given."""
    try:
        result = call()
    except error as raised:
        require(file is None or raised.file == file, f"the error of {what} must name the file {file!r}")
        return raised
    except Exception as raised:
        raise AssertionError(f"{what} must raise {error.__name__}, not {type(raised).__name__}: {raised}") from raised
    raise AssertionError(f"{what} must raise {error.__name__}, but returned {result!r:.60}")


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Call ``work`` with each number in a thread of its own; raise AssertionError for the first failure."""
    problems: list[str] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:  # noqa: BLE001  (reported in the caller's thread)
            named = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            problems.append(f"in {count} threads at the same time: {named}{error}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require(not problems, next(iter(problems), ""))


def _random_ranges(end: int, count: int, *, seed: int) -> list[tuple[int, int]]:
    generator = random.Random(seed)
    firsts = [generator.randrange(end) for _ in range(count)]
    return [(first, generator.randint(1, end - first)) for first in firsts]


def _read_into(source: Source, offset: int, nbytes: int) -> tuple[int, bytes]:
    """Return the number of bytes read, and the buffer, which held other bytes before."""
    data = bytearray([_UNTOUCHED]) * nbytes
    return source.read_into(offset, memoryview(data)), bytes(data)


@dataclass(frozen=True, slots=True)
class _Case:
    """The checks of a source with an expected content."""

    make_source: MakeSource
    content: bytes

    @property
    def _end(self) -> int:
        return len(self.content)

    def _ranges(self) -> list[tuple[int, int]]:
        """Return offset and size of reads inside the content, including reads at its boundaries."""
        end = self._end
        at_borders = [(0, 1), (0, end), (end - 1, 1), (1, end - 2), (BLOCK_BYTES - 1, 2), (BLOCK_BYTES, BLOCK_BYTES)]
        return at_borders + _random_ranges(end, 20, seed=0)

    def path(self, source: Source) -> None:
        address = urlsplit(source.path)
        require(source.path and isinstance(source.path, str), "path must be a non-empty string")
        require(not address.scheme or "@" not in address.netloc, "path must not show a user or a password")
        require("://" not in source.path or not address.query, "path must not show a query: it can hold a signature")

    def identity(self, source: Source) -> None:
        first = source.identity
        require(first.nbytes == self._end, f"identity.nbytes must be {self._end}, not {first.nbytes}")
        with closing(self.make_source()) as other:
            require(other.identity == first, "two sources of the same object must have the same identity")
        source.read_at(0, 1)
        require(source.identity == first, "the identity must not change after a read")

    def access(self, source: Source) -> None:
        access = source.access
        size, gap, parallel = access.request_bytes, access.gap_bytes, access.parallel_requests
        expected = f"a multiple of {BLOCK_BYTES} and at least {SMALLEST_STAGING_BYTES}"
        fits = size >= SMALLEST_STAGING_BYTES and not size % BLOCK_BYTES
        require(fits, f"access.request_bytes must be {expected}, not {size}")
        require(gap >= 0, f"access.gap_bytes must not be negative: {gap}")
        require(parallel >= 1, f"access.parallel_requests must be at least 1, not {parallel}")
        source.read_at(0, 1)
        require(source.access == access, "access must not change while the source is open")

    def read_at(self, source: Source) -> None:
        for offset, nbytes in self._ranges():
            found = source.read_at(offset, nbytes)
            what = f"read_at({offset}, {nbytes}) must return"
            require(isinstance(found, bytes), f"{what} bytes, not {type(found).__name__}")
            require(found == self.content[offset : offset + nbytes], f"{what} exactly those bytes")

    def read_at_outside(self, source: Source) -> None:
        end = self._end
        outside = [(0, end + 1), (end, 1), (end - 1, 2), (end + 1, 0), (0, 1 << 60), (-1, 2), (5, -1)]
        for offset, nbytes in [*outside, *((far, 1) for far in _FAR_OFFSETS)]:
            what = f"read_at({offset}, {nbytes}) of {end} bytes"
            error = must_raise(TruncatedError, what, partial(source.read_at, offset, nbytes), file=source.path)
            require(error.offset == offset, f"the error of {what} must have the offset")

    def read_into(self, source: Source) -> None:
        for offset, nbytes in self._ranges():
            found, data = _read_into(source, offset, nbytes)
            what = f"read_into({offset}, {nbytes} bytes) must"
            require(found == nbytes, f"{what} return {nbytes}, not {found}: reads are short only at the end")
            require(data == self.content[offset : offset + nbytes], f"{what} fill the buffer with exactly those bytes")
        part = bytearray([_UNTOUCHED]) * 300
        source.read_into(7, memoryview(part)[100:200])
        require(part[100:200] == self.content[7:107], "read_into must fill the buffer that it was passed")
        around = part[:100] + part[200:]
        require(around == bytes([_UNTOUCHED]) * 200, "read_into must not write outside its buffer")

    def read_into_at_the_end(self, source: Source) -> None:
        for inside in (1, 100, BLOCK_BYTES):
            found, data = _read_into(source, self._end - inside, inside + 50)
            require(found == inside, f"a read across the end must return the {inside} bytes before it, not {found}")
            require(data[:inside] == self.content[-inside:], "a read across the end must fill the bytes before it")
        for offset in (self._end, self._end + 1, *_FAR_OFFSETS):
            found, _ = _read_into(source, offset, 10)
            require(found == 0, f"read_into from {offset}, past the end, must return 0, not {found}")
        must_raise(TruncatedError, "read_into from a negative offset", lambda: _read_into(source, -5, 3))

    def no_bytes(self, source: Source) -> None:
        for offset in (0, 17, self._end):
            found, _ = _read_into(source, offset, 0)
            require(source.read_at(offset, 0) == b"", f"read_at({offset}, 0) must return no bytes")
            require(found == 0, f"read_into({offset}, no bytes) must return 0, not {found}")

    def buffer_is_not_kept(self, source: Source) -> None:
        data = bytearray(100)
        view = memoryview(data)
        source.read_into(0, view)
        try:
            view.release()
            data.clear()  # fails while an export of the memory exists
        except BufferError as error:
            raise AssertionError("the buffer must not be kept after read_into returns") from error

    def direct(self, source: Source) -> None:
        """Check direct reads, which are optional, also of the last block."""
        last = self._end // BLOCK_BYTES * BLOCK_BYTES
        for offset, nbytes in [(0, BLOCK_BYTES), (BLOCK_BYTES, 4 * BLOCK_BYTES), (last, BLOCK_BYTES)]:
            with memoryview(mmap.mmap(-1, nbytes)) as view:  # begins at a page
                try:
                    found = source.read_into(offset, view, direct=True)
                except DirectIOUnavailable:
                    return
                expected = self.content[offset : offset + nbytes]
                require(found == len(expected), f"a direct read must return {len(expected)} bytes, not {found}")
                require(view[:found] == expected, "a direct read must return the same bytes as a buffered one")

    def threads(self, source: Source) -> None:
        """Read different ranges from several threads at the same time, with both methods."""
        begin = threading.Barrier(_THREADS)

        def work(number: int) -> None:
            begin.wait()
            for offset, nbytes in _random_ranges(self._end, 25, seed=number):
                expected = self.content[offset : offset + nbytes]
                right = source.read_at(offset, nbytes) == expected
                require(
                    right and _read_into(source, offset, nbytes) == (nbytes, expected), "each must get its own bytes"
                )

        in_threads(_THREADS, work)

    def forget(self, source: Source) -> None:
        for offset, nbytes in [(0, self._end), (5, 10), (0, 0), (self._end, 10)]:
            source.forget(offset, nbytes)
            require(source.read_at(0, self._end) == self.content, "forget must not change the content")

    def unchanged(self, source: Source) -> None:
        source.check_unchanged()
        source.read_at(0, 1)
        source.check_unchanged()
        source.close()
        source.check_unchanged()

    def close(self, source: Source) -> None:
        self.make_source().close()  # a source that was never read
        source.read_at(0, 1)
        source.close()
        source.close()
        require(source.read_at(3, 5) == self.content[3:8], "a closed source must reopen when it is read")

    def failures(self, failing: Callable[[], AbstractContextManager[object]], source: Source) -> None:
        calls = {"read_at": lambda: source.read_at(11, 4), "read_into": lambda: _read_into(source, 11, 4)}
        with failing():
            for name, call in calls.items():
                error = must_raise(ReadError, f"a failing {name}", call, file=source.path)
                require(error.__cause__, f"the error of a failing {name} must be raised from the system's error")
        require(source.read_at(11, 4) == self.content[11:15], "reads must work after a failed read")

    def changes(self, change: Callable[[], object], pinned: bool, kept: Source) -> None:
        with closing(self.make_source()) as closed:
            kept.read_at(0, 1)
            closed.read_at(0, 1)
            closed.close()
            change()
            if pinned:
                must_raise(SourceChangedError, "a read after a change", lambda: kept.read_at(0, self._end))
            else:
                must_raise(SourceChangedError, "check_unchanged after a change", kept.check_unchanged)
            must_raise(SourceChangedError, "a read after close and a change", lambda: closed.read_at(0, 1))
