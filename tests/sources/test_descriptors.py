"""The bounded cache of descriptors: closing, descriptors in use, and exhaustion."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from sluice._errors import ReadError, SourceChangedError
from sluice.sources import descriptors as _descriptors
from sluice.sources import local as _local
from sluice.sources.descriptors import Descriptor, DescriptorCache, Lease
from sluice.sources.local import LocalFile
from support.leaks import open_files


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number:03}" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 5000)
    return paths


@pytest.fixture
def cache() -> Iterator[DescriptorCache]:
    made = DescriptorCache(3)
    yield made
    for key in list(made._open):
        made.drop(key)


def opening(path: Path) -> Callable[[list[int]], None]:
    return lambda opened: opened.append(os.open(path, os.O_RDONLY))


def are_open(files: Sequence[Path]) -> list[bool]:
    """Return per file whether this process has it open."""
    targets = open_files()
    return [str(path) in targets for path in files]


def take(cache: DescriptorCache, path: Path, open_file: Callable[[list[int]], None] | None = None) -> Lease:
    lease = Lease()
    cache.take((path, False), open_file or opening(path), lease)
    return lease


def use(cache: DescriptorCache, path: Path) -> Descriptor:
    lease = take(cache, path)
    cache.give_back(lease)
    assert lease.descriptor is not None
    return lease.descriptor


def refuse(_: list[int] | None = None) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_the_least_recently_used_is_closed_first(cache: DescriptorCache, files: list[Path]) -> None:
    first, _, _ = (use(cache, path) for path in files[:3])
    assert use(cache, files[0]) is first
    use(cache, files[3])
    assert are_open(files[:5]) == [True, False, True, True, False]


def test_a_descriptor_in_use_is_never_closed(cache: DescriptorCache, files: list[Path]) -> None:
    lent = [take(cache, path) for path in files[:5]]
    use(cache, files[6])
    assert all(are_open(files[:5]))
    for lease in lent:
        cache.give_back(lease)
    use(cache, files[7])
    assert are_open(files[:8]) == [False, False, False, False, True, False, True, True]


def test_a_dropped_descriptor_in_use_closes_after_its_last_reader(cache: DescriptorCache, files: list[Path]) -> None:
    key = (files[0], False)
    one, two = (take(cache, files[0]) for _ in range(2))
    assert one.descriptor is two.descriptor
    cache.drop(key)
    cache.give_back(one)
    assert are_open(files[:1]) == [True]
    cache.give_back(two)
    assert are_open(files[:1]) == [False]
    cache.drop(key)  # there are no descriptors left to close


def test_a_quarter_of_the_limit_of_the_process_is_enough(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DescriptorCache(100)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 4096))
    for path in files:
        use(cache, path)
    assert are_open(files) == [False] * 32 + [True] * 8
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 4096))
    for path in files[:10]:
        use(cache, path)
    monkeypatch.setattr(_descriptors, "resource", None)  # as on Windows
    for path in files[10:]:
        use(cache, path)
    assert all(are_open(files))
    for path in files:
        cache.drop((path, False))


def test_exhaustion_halves_the_cache_permanently(files: list[Path]) -> None:
    cache = DescriptorCache(8)
    for path in files[:8]:
        use(cache, path)
    answers = iter([refuse, refuse, opening(files[8])])

    def open_at_the_third_try(opened: list[int]) -> None:
        next(answers)(opened)

    cache.give_back(take(cache, files[8], open_at_the_third_try))
    assert sum(are_open(files)) == 2  # two refusals: 8 to 4 to 2
    for path in files:
        use(cache, path)
    assert are_open(files) == [False] * 38 + [True] * 2
    for path in files:
        cache.drop((path, False))


def test_none_left_waits_for_a_reader_to_finish(cache: DescriptorCache, files: list[Path]) -> None:
    lent = take(cache, files[0])
    refused = threading.Event()

    def open_when_the_other_is_closed(opened: list[int]) -> None:
        if are_open(files[:1]) == [True]:
            refused.set()
            refuse()
        opened.append(os.open(files[1], os.O_RDONLY))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, cache, files[1], open_when_the_other_is_closed)
        assert refused.wait(10)
        cache.give_back(lent)
        cache.give_back(waiting.result(10))
    assert are_open(files[:2]) == [False, True]


def test_none_left_is_an_error_when_nothing_can_be_closed(
    cache: DescriptorCache, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        take(cache, files[0], refuse)
    monkeypatch.setattr(_descriptors, "_PATIENCE_SECONDS", 0.01)
    lent = take(cache, files[0])
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        take(cache, files[1], refuse)
    cache.give_back(lent)


def test_a_missing_descriptor_is_an_error_that_names_the_file(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_local, "DESCRIPTORS", DescriptorCache(4))
    monkeypatch.setattr(os, "open", lambda *_: refuse())
    with pytest.raises(ReadError, match=os.strerror(errno.EMFILE)) as caught:
        LocalFile(files[0]).read_at(0, 1)
    assert caught.value.file == str(files[0])


def test_two_threads_that_open_one_file_share_its_descriptor(cache: DescriptorCache, files: list[Path]) -> None:
    together = threading.Barrier(2, timeout=90)
    numbers = []

    def open_at_once(opened: list[int]) -> None:
        together.wait()
        opened.append(os.open(files[0], os.O_RDONLY))
        numbers.extend(opened)

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: take(cache, files[0], open_at_once), range(2))
    assert one.descriptor is two.descriptor
    assert len(numbers) == 2
    assert open_files()[str(files[0])] == 1
    cache.give_back(one)
    cache.give_back(two)


@pytest.mark.parametrize("limit", [1, 3])
def test_many_threads_read_many_files_through_few_descriptors(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(_local, "DESCRIPTORS", DescriptorCache(limit))
    with ExitStack() as stack:
        sources = [stack.enter_context(closing(LocalFile(path))) for path in files]

        def read(number: int) -> bool:
            which = number * 7 % len(sources)
            return sources[which].read_at(number, 3000) == bytes([which]) * 3000

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(1000)))


def test_a_file_replaced_while_its_descriptor_was_closed_is_noticed(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_local, "DESCRIPTORS", DescriptorCache(1))
    with closing(LocalFile(files[0])) as first, closing(LocalFile(files[1])) as second:
        assert first.read_at(0, 2) == b"\0\0"
        files[2].replace(files[0])
        assert first.read_at(0, 2) == b"\0\0"  # the descriptor still refers to the old file
        second.read_at(0, 1)
        with pytest.raises(SourceChangedError):
            first.read_at(0, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_fork_inherits_no_readers_and_no_lock(files: list[Path]) -> None:
    """Runs in a separate process, because the test forks a process with threads."""
    code = """if True:
        import os, sys, threading, warnings
        from sluice.sources.descriptors import DESCRIPTORS
        from sluice.sources.local import LocalFile

        warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, for the same reason
        source, locked, done = LocalFile(sys.argv[1]), threading.Event(), threading.Event()
        source.read_at(0, 1)

        def hold():
            with source.lend(), DESCRIPTORS._lock:
                locked.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        locked.wait()
        child = os.fork()
        if child == 0:
            read = source.read_at(0, 2) == bytes(2)
            source.close()
            os._exit(0 if read and not DESCRIPTORS._open else 1)
        status = os.waitpid(child, 0)[1]
        done.set()
        thread.join()
        sys.exit(os.waitstatus_to_exitcode(status))
    """
    subprocess.run([sys.executable, "-c", code, str(files[0])], check=True, timeout=100)


def test_an_interrupt_right_after_the_opening_leaves_nothing_open(cache: DescriptorCache, files: list[Path]) -> None:
    def interrupted(opened: list[int]) -> None:
        opened.append(os.open(files[0], os.O_RDONLY))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(cache, files[0], interrupted)
    assert are_open(files[:1]) == [False]


class InterruptedLock:
    """A lock whose n-th release raises an interrupt."""

    def __init__(self, at: int) -> None:
        self._lock = threading.Lock()
        self.acquire, self.release, self.locked = self._lock.acquire, self._lock.release, self._lock.locked
        self.releases_left = at

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self.releases_left -= 1
        if self.releases_left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_when_the_lock_is_released_leaves_nothing_open(
    at: int, cached: bool, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DescriptorCache(3)
    monkeypatch.setattr(_local, "DESCRIPTORS", cache)
    with closing(LocalFile(files[0])) as source:
        if cached:
            source.read_at(0, 1)
        lock = InterruptedLock(at)
        monkeypatch.setattr(cache, "_lock", lock)
        monkeypatch.setattr(cache, "_returned", threading.Condition(lock))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            source.read_at(0, 1)
        assert lock.releases_left <= 0
    assert are_open(files[:1]) == [False]


def test_descriptors_that_others_hold_do_not_shrink_an_empty_cache(cache: DescriptorCache, files: list[Path]) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        take(cache, files[0], refuse)
    for path in files[:3]:
        use(cache, path)
    assert are_open(files[:3]) == [True] * 3
