"""The method of a read when it starts: several readers of one file, and pages cached since the plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from sluice._defaults import CACHED_SHARE
from sluice._options import PageCache as PageCacheOption
from sluice.engine.session import ReadMethods
from sluice.engine.targets import Targets
from sluice.records import Method
from sluice.sources.pages import FileWatch
from support.plans import MIB, Stored, entry_of, execute, request

DIRECT: tuple[Method, ...] = ("direct", "buffered")


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Stored]:
    with Stored(tmp_path / "f", [torch.randn(9 * MIB)]) as stored:
        yield stored


@pytest.mark.parametrize(
    ("shared", "cached", "expected"),
    [
        (False, CACHED_SHARE - 0.01, (DIRECT, "")),
        (False, CACHED_SHARE, (("buffered",), "cached")),
        (True, 0.0, (("buffered",), "shared")),
    ],
)
def test_a_direct_read_steps_down_if_the_file_is_shared_or_its_range_was_cached(
    weights: Stored, monkeypatch: pytest.MonkeyPatch, shared: bool, cached: float, expected: object
) -> None:
    monkeypatch.setattr(FileWatch, "others_read", lambda _: shared)
    monkeypatch.setattr(FileWatch, "cached_share", lambda *_: cached)
    plan, methods = weights.plan(0)[0], ReadMethods([weights.source])
    assert methods.of(plan, plan.reads[0]) == expected
    for alone in (("buffered",), ("direct",)):
        assert methods.of(plan, replace(plan.reads[0], methods=alone)) == (alone, "")
    methods.close()


@pytest.mark.parametrize(("page_cache", "joined"), [("auto", True), ("bypass", False)])
def test_a_file_that_another_load_reads_goes_through_the_page_cache(
    weights: Stored, page_cache: PageCacheOption, joined: bool
) -> None:
    [tensor], source = weights.tensors, weights.source
    plan, views = weights.plan_of([request("t", entry_of(tensor, 0))], page_cache=page_cache)
    other = FileWatch.open(source.path)
    assert other is not None
    try:
        if not other.others_read() and not _sees_marks(source.path):
            pytest.skip("this system has no locks of open file descriptions")
        memory = Targets(plan)
        result = execute(plan, [source], memory)
    finally:
        other.close()
    [loaded] = memory.tensors(views)
    assert torch.equal(loaded, tensor)
    assert result.surprises == ({"shared": tensor.nbytes} if joined else {})
    assert result.stepped_down == 0
    assert (result.read_bytes["direct"] == 0) == joined


def test_only_loads_of_the_same_part_of_a_file_notice_each_other(weights: Stored) -> None:
    """Ranks that read different halves of each tensor have nothing to share."""
    plan, size = weights.plan(0)[0], MIB
    first, second = (
        replace(plan, reads=tuple(replace(read, offset=read.offset + at, nbytes=size) for read in plan.reads))
        for at in (0, size)
    )
    for other, expected in ((first, "shared"), (second, "")):
        one, another = ReadMethods([weights.source]), ReadMethods([weights.source])
        one.of(first, first.reads[0])
        if _sees_marks(weights.source.path, 1 + first.reads[0].offset):
            assert another.of(other, other.reads[0])[1] == expected
        one.close()
        another.close()


def test_marks_are_removed_when_the_plan_is_done(weights: Stored) -> None:
    plan, source = weights.plan(0)[0], weights.source
    methods = ReadMethods([source])
    assert methods.of(plan, plan.reads[0]) == (DIRECT, "")
    methods.close()
    late = FileWatch.open(source.path)
    assert late is not None
    assert not late.others_read()
    late.close()


def _sees_marks(path: str, part: int = 0) -> bool:
    third = FileWatch.open(path, part)
    assert third is not None
    try:
        return third.others_read()
    finally:
        third.close()
