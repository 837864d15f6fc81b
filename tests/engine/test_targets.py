from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice.engine import targets as engine_targets
from sluice.engine.host_memory import HostMemory, PageSizes
from sluice.engine.targets import Targets
from sluice.sources.local import LocalFile
from support.plans import MIB, Stored, execute
from support.watching import watch


def test_large_targets_are_mapped_before_the_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    watch(monkeypatch, LocalFile, "read_into", lambda *_, **__: done.append("read"))
    watch(monkeypatch, engine_targets, "HostMemory", lambda *_, **__: done.append("map"))
    tensors = [torch.randn(MIB) for _ in range(3)]
    with Stored(tmp_path / "f", tensors) as stored:
        plan, views = stored.plan(0, 1, 2)
        memory = Targets(plan)
        execute(plan, [stored.source], memory)
        assert done == ["map"] * 3 + ["read"] * 3
        assert all(torch.equal(new, old) for new, old in zip(memory.tensors(views), tensors, strict=True))


def test_recycled_memory_stays_on_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageSizes, "choose", lambda *_: pytest.fail("chosen"))
    with Stored(tmp_path / "f", [torch.zeros(MIB)]) as stored:
        plan, _ = stored.plan(0)
    Targets(plan, take_memory=lambda nbytes: HostMemory(nbytes, huge_pages=True)).window(0, 0, 4 * MIB)


@pytest.mark.parametrize("way", ["read", "cast", "transposed"])
def test_pages_are_chosen_for_every_byte_of_a_large_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(PageSizes, "choose", lambda *where: chosen.append(where[-2:]))
    tensor = torch.randn(2048, 2048)
    tensor = tensor.t() if way == "transposed" else tensor
    with Stored(tmp_path / "f", [tensor]) as stored:
        plan, views = stored.plan(0, dtype="bfloat16" if way == "cast" else "float32")
        memory = Targets(plan)
        execute(plan, [stored.source], memory)
        [result] = memory.tensors(views)
    assert torch.equal(result, tensor.to(result.dtype))
    end = plan.blocks[0].offset
    for start, nbytes in sorted(chosen):
        assert start <= end
        end = max(end, start + nbytes)
    assert end >= plan.blocks[0].offset + result.nbytes
