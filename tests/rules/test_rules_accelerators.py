"""Copies, products and constants of rules on accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice._dtypes import dtype_name
from sluice.engine.accelerators import Accelerator
from sluice.engine.targets import Targets
from sluice.entries.assembly import compute, pad, permute
from sluice.planning.memory_layout import single_targets
from sluice.planning.planner import plan_load
from sluice.records import Entry, FileRecord, LoadPlan
from sluice.sources.local import LocalFile
from support.fake_accelerator import FakeAccelerator
from support.plans import MIB, entry_of, facts, index_of, request, write_storages
from support.running import execute

FAKE = "fake:0"


class _Blocking(Accelerator):
    """An accelerator whose memory is host memory."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def finish(self) -> None:
        """Return at once: copies are synchronous."""


def load(
    path: Path, tensors: list[torch.Tensor], entries: list[Entry], dtype: torch.dtype, fake: Accelerator, cores: int = 2
) -> tuple[list[torch.Tensor], LoadPlan]:
    places = write_storages(path, tensors, shift=2)
    source = LocalFile(path)
    try:
        index = index_of(places, (FileRecord(path=str(path), identity=source.identity),))
        requests = [
            request(f"t{i}", entry, device=FAKE, dtype=dtype_name(dtype), stride=None)
            for i, entry in enumerate(entries)
        ]
        targets, views = single_targets(requests, index, {})
        plan = plan_load(targets, index.files, facts(cached=True, cores=cores), staging_bytes=MIB)
        memory = Targets(plan, accelerators={FAKE: fake})
        execute(plan, [source], memory)
        return memory.tensors(views), plan
    finally:
        source.close()


@pytest.mark.parametrize("cores", [2, 16])  # with many, the host casts to narrower dtypes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocking", [False, True])
def test_products_and_constants_arrive(tmp_path: Path, blocking: bool, dtype: torch.dtype, cores: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(700, 500), torch.randn(3, 4), torch.randn(MIB), torch.empty(0, 2)]
    entries = [entry_of(tensor, i) for i, tensor in enumerate(tensors)]
    wanted = [
        permute(compute(entries[0], "mul", 0.1), (1, 0)),
        compute(pad(entries[1], 0, 5, 0.3), "add", 3.3),
        compute(compute(entries[2], "mul", 1.7), "add", -0.3),
        pad(entries[3], 0, 4, 2.5),
    ]
    fake = _Blocking() if blocking else FakeAccelerator()
    loaded, plan = load(tmp_path / "f", tensors, wanted, dtype, fake, cores)
    if isinstance(fake, FakeAccelerator):
        fake.assert_filled_once()
    expected = [
        (tensors[0] * 0.1).t(),
        torch.cat([tensors[1], torch.full((2, 4), 0.3)]) + 3.3,
        tensors[2] * 1.7 - 0.3,
        torch.full((4, 2), 2.5),
    ]
    for ours, theirs in zip(loaded, expected, strict=True):
        assert torch.equal(ours, theirs.to(dtype))
    assert plan.devices[0].scratch_bytes  # multiplication on the device needs scratch memory
