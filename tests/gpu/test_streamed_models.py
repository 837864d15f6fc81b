"""Models that are streamed through a device that does not hold them."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import pytest
import torch

import sluice
from support.simulated_device import Simulator
from support.streamed_models import Layers, block_bytes, empty, saved

pytestmark = pytest.mark.gpu

Deep = partial(Layers, count=24)

IDS = torch.tensor([[1, 2, 3, 999]])


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("blocks", [2, 4])
def test_outputs_are_those_of_the_loaded_model(
    tmp_path: Path, device: str, sim: Simulator, seed: int | None, blocks: int
) -> None:
    sim.schedule(seed)
    with torch.inference_mode():
        model, running = saved(Deep, tmp_path / "model.pth"), empty(Deep)
        before = torch.accelerator.memory_reserved()
        memory = sluice.MemoryLimits(device=blocks * block_bytes())
        with sluice.stream(running, tmp_path / "model.pth", memory=memory, device=device):
            for _ in range(3):
                torch.testing.assert_close(running(IDS.to(device)).cpu(), model(IDS))
            assert torch.accelerator.max_memory_allocated() < sum(weight.nbytes for weight in model.parameters()) / 2
    del running
    gc.collect()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == before
    assert sim.page_locked_bytes()[0] == 0
