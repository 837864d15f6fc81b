"""The bounded cache of descriptors: closing, descriptors in use, and exhaustion."""

from __future__ import annotations

import errno
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sluice.sources import descriptors as _descriptors
from sluice.sources import local as _local
from sluice.sources import pages as _pages
from sluice.sources.descriptors import DescriptorCache, OwnedFile
from sluice.sources.local import LocalFile
from support.leaks import open_files
from support.system_calls import failing


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
    made._open.clear()


def opening(path: Path) -> Callable[[], OwnedFile]:
    return lambda: OwnedFile.open(str(path))


def are_open(files: Sequence[Path]) -> list[bool]:
    """Return per file whether this process has it open."""
    targets = open_files()
    return [str(path) in targets for path in files]


def take(cache: DescriptorCache, path: Path) -> OwnedFile:
    return cache.take((path, False), opening(path))


refuse = failing(errno.EMFILE)


def test_the_least_recently_used_is_closed_first(cache: DescriptorCache, files: list[Path]) -> None:
    for path in (*files[:3], files[0], files[3]):
        take(cache, path)
    assert are_open(files[:5]) == [True, False, True, True, False]


def test_a_descriptor_in_use_is_never_closed(cache: DescriptorCache, files: list[Path]) -> None:
    lent = [take(cache, path) for path in files[:5]]
    take(cache, files[5])
    assert all(are_open(files[:5]))
    cache.drop((files[4], False))
    assert all(are_open(files[:5]))
    lent.clear()
    assert are_open(files[:6]) == [False, False, False, True, False, True]


def test_a_quarter_of_the_limit_of_the_process_is_enough(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DescriptorCache(100)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 4096))
    for path in files:
        take(cache, path)
    assert are_open(files) == [False] * 32 + [True] * 8
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 4096))
    for path in files[:10]:
        take(cache, path)
    monkeypatch.setattr(_descriptors, "resource", None)  # as on Windows
    for path in files[10:]:
        take(cache, path)
    assert all(are_open(files))


def test_exhaustion_halves_the_cache_permanently(files: list[Path]) -> None:
    cache = DescriptorCache(8)
    for path in files[:8]:
        take(cache, path)
    answers = iter([refuse, refuse, opening(files[8])])

    def open_at_the_third_try() -> OwnedFile:
        return next(answers)()

    cache.take((files[8], False), open_at_the_third_try)
    assert sum(are_open(files)) == 2  # two refusals: 8 to 4 to 2
    for path in files:
        take(cache, path)
    assert are_open(files) == [False] * 38 + [True] * 2


def test_none_left_waits_for_a_reader_to_finish(cache: DescriptorCache, files: list[Path]) -> None:
    lent = [take(cache, files[0])]
    refused = threading.Event()

    def open_when_the_other_is_closed() -> OwnedFile:
        if are_open(files[:1]) == [True]:
            refused.set()
            refuse()
        return OwnedFile.open(str(files[1]))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.take, (files[1], False), open_when_the_other_is_closed)
        assert refused.wait(10)
        lent.clear()
        assert waiting.result(10)
    assert are_open(files[:2]) == [False, True]


def test_none_left_is_an_error_when_nothing_can_be_closed(
    cache: DescriptorCache, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        cache.take((files[0], False), refuse)
    for path in files[:3]:
        take(cache, path)
    assert are_open(files[:3]) == [True] * 3  # that others held them shrank nothing
    monkeypatch.setattr(_descriptors, "_PATIENCE_SECONDS", 0.01)
    lent = take(cache, files[0])
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        cache.take((files[3], False), refuse)
    assert not lent.closed


def test_two_threads_that_open_one_file_share_its_descriptor(cache: DescriptorCache, files: list[Path]) -> None:
    together = threading.Barrier(2, timeout=90)

    def open_at_once() -> OwnedFile:
        together.wait()
        return OwnedFile.open(str(files[0]))

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: cache.take((files[0], False), open_at_once), range(2))
    assert one is two
    assert open_files()[str(files[0])] == 1


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts of __del__
def test_an_interrupt_at_any_step_leaves_nothing_open(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_local, "DESCRIPTORS", DescriptorCache(4))
    traced = {module.__file__ for module in (_descriptors, _local, _pages)}
    steps_left = step = 0

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps_left
        if frame.f_code.co_filename not in traced:
            return None
        frame.f_trace_opcodes = True
        steps_left -= event == "opcode"
        if event == "opcode" and steps_left == 0:
            raise KeyboardInterrupt
        return interrupt

    former = sys.gettrace()
    while steps_left == 0:
        steps_left = step = step + 1
        with suppress(KeyboardInterrupt):
            sys.settrace(interrupt)
            with closing(LocalFile(files[0])) as source, closing(source.watch() or source):
                source.read_at(0, 5)
        sys.settrace(former)
    gc.collect()
    assert step > 200
    assert are_open(files[:1]) == [False]
