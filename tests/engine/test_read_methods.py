"""The method of a read when it starts: several readers of one file, and pages cached since the plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sluice._defaults import CACHED_SHARE
from sluice._options import PageCache as PageCacheOption
from sluice.engine.read_methods import ReadMethods, ReadState, choose_methods
from sluice.engine.targets import Targets
from sluice.planning.memory_layout import single_targets
from sluice.planning.planner import plan_load
from sluice.records import FileRecord, Method
from sluice.sources.local import LocalFile
from sluice.sources.pages import FileWatch
from support.plans import MIB, entry_of, facts, index_of, request, write_storages
from support.running import execute

DIRECT: tuple[Method, ...] = ("direct", "buffered")


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[tuple[torch.Tensor, LocalFile, list[tuple[int, int]]]]:
    tensor = torch.randn(9 * MIB)
    places = write_storages(tmp_path / "f", [tensor])
    source = LocalFile(tmp_path / "f")
    yield tensor, source, places
    source.close()


def test_a_direct_read_steps_down_if_the_file_is_shared_or_its_range_was_cached() -> None:
    assert choose_methods(DIRECT, ReadState()) == (DIRECT, "")
    assert choose_methods(DIRECT, ReadState(shared=True)) == (("buffered",), "shared")
    assert choose_methods(DIRECT, ReadState(cached_share=CACHED_SHARE)) == (("buffered",), "cached")
    assert choose_methods(DIRECT, ReadState(cached_share=CACHED_SHARE - 0.01)) == (DIRECT, "")
    everything = ReadState(shared=True, cached_share=1.0)
    assert choose_methods(("buffered",), everything) == (("buffered",), "")
    assert choose_methods(("direct",), everything) == (("direct",), "")


@pytest.mark.parametrize(("page_cache", "joined"), [("auto", True), ("bypass", False)])
def test_a_file_that_another_load_reads_goes_through_the_page_cache(
    weights: tuple[torch.Tensor, LocalFile, list[tuple[int, int]]], page_cache: PageCacheOption, joined: bool
) -> None:
    tensor, source, places = weights
    index = index_of(places, (FileRecord(path=source.path, identity=source.identity),))
    targets, views = single_targets([request("t", entry_of(tensor, 0))], index, {})
    plan = plan_load(targets, index.files, facts(cached=False), staging_bytes=8 * MIB, page_cache=page_cache)
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


def test_marks_are_removed_when_the_plan_is_done(
    weights: tuple[torch.Tensor, LocalFile, list[tuple[int, int]]],
) -> None:
    tensor, source, places = weights
    index = index_of(places, (FileRecord(path=source.path, identity=source.identity),))
    targets, _ = single_targets([request("t", entry_of(tensor, 0))], index, {})
    plan = plan_load(targets, index.files, facts(cached=False), staging_bytes=8 * MIB)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    methods = ReadMethods([source])
    assert methods.of(plan, plan.reads[0]) == (DIRECT, "")
    methods.close()
    assert not before or len(os.listdir("/proc/self/fd")) == before
    late = FileWatch.open(source.path)
    assert late is not None
    assert not late.others_read()
    late.close()


def _sees_marks(path: str) -> bool:
    third = FileWatch.open(path)
    assert third is not None
    try:
        return third.others_read()
    finally:
        third.close()
