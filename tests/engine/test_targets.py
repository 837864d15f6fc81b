from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from sluice.engine import targets as engine_targets
from sluice.engine.host_memory import HostMemory
from sluice.engine.page_sizes import PageSizes
from sluice.engine.targets import Targets
from sluice.planning.memory_layout import single_targets
from sluice.planning.planner import plan_load
from sluice.records import FileRecord
from sluice.sources.local import LocalFile
from support.plans import MIB, entry_of, facts, index_of, request, write_storages
from support.running import execute


def test_large_targets_are_mapped_before_the_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def mapped(nbytes: int, *, huge_pages: bool) -> HostMemory:
        done.append("map")
        return HostMemory(nbytes, huge_pages=huge_pages)

    class Noted(LocalFile):
        def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
            done.append("read")
            return super().read_into(offset, buffer, direct=direct)

    monkeypatch.setattr(engine_targets, "HostMemory", mapped)
    tensors = [torch.randn(MIB) for _ in range(3)]
    places = write_storages(tmp_path / "f", tensors)
    source = Noted(tmp_path / "f")
    try:
        index = index_of(places, (FileRecord(path=source.path, identity=source.identity),))
        requests = [request(f"t{i}", entry_of(tensor, i)) for i, tensor in enumerate(tensors)]
        targets, views = single_targets(requests, index, {})
        plan = plan_load(targets, index.files, facts(cached=False), staging_bytes=8 * MIB)
        memory = Targets(plan)
        execute(plan, [source], memory)
        assert done == ["map"] * 3 + ["read"] * 3
        assert all(torch.equal(new, old) for new, old in zip(memory.tensors(views), tensors, strict=True))
    finally:
        source.close()


def test_recycled_memory_stays_on_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageSizes, "choose", lambda *_: pytest.fail("chosen"))
    index = index_of([(0, 4 * MIB)])
    targets, _ = single_targets([request("t", entry_of(torch.empty(MIB), 0))], index, {})
    plan = plan_load(targets, index.files, facts(cached=False), staging_bytes=8 * MIB)
    Targets(plan, take_memory=lambda nbytes: HostMemory(nbytes, huge_pages=True)).window(0, 0, 4 * MIB)


@pytest.mark.parametrize("way", ["read", "cast", "transposed"])
def test_pages_are_chosen_for_every_byte_of_a_large_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(PageSizes, "choose", lambda *where: chosen.append(where[-2:]))
    tensor = torch.randn(2048, 2048)
    places = write_storages(tmp_path / "f", [tensor])
    source = LocalFile(tmp_path / "f")
    try:
        index = index_of(places, (FileRecord(path=source.path, identity=source.identity),))
        wanted = request("t", entry_of(tensor.t() if way == "transposed" else tensor, 0))
        if way == "cast":
            wanted = replace(wanted, dtype="bfloat16")
        targets, views = single_targets([wanted], index, {})
        plan = plan_load(targets, index.files, facts(cached=False), staging_bytes=8 * MIB)
        memory = Targets(plan)
        execute(plan, [source], memory)
        [result] = memory.tensors(views)
    finally:
        source.close()
    assert torch.equal(result, (tensor.t() if way == "transposed" else tensor).to(result.dtype))
    end = plan.blocks[0].lead_bytes
    for start, nbytes in sorted(chosen):
        assert start <= end
        end = max(end, start + nbytes)
    assert end >= plan.blocks[0].lead_bytes + result.nbytes
