"""Models that are streamed through a device that does not hold them."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from support.simulated_device import Simulator
from support.streamed_models import Layers, block_bytes, empty, saved
from support.streamed_training import adapt, same, train

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


@pytest.mark.parametrize("seed", [None, 1])
def test_adapters_are_trained_as_in_the_memory_of_the_device(
    tmp_path: Path, device: str, sim: Simulator, seed: int | None
) -> None:
    sim.schedule(seed)
    model, running = saved(Deep, tmp_path / "model.pth"), empty(Deep).requires_grad_(False)
    sluice.load_into(model, tmp_path / "model.pth", device=device)

    def loss(model: nn.Module) -> torch.Tensor:
        result: torch.Tensor = model(IDS.to(device)).logsumexp(-1).mean()
        return result

    want = train(adapt(model.eval().requires_grad_(False), ["0"]).to(device), loss, steps=3)
    del model
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    memory = sluice.MemoryLimits(device=4 * block_bytes())
    with sluice.stream(running, tmp_path / "model.pth", memory=memory, device=device, train=True) as stream:
        adapt(running, ["0"]).to(device)  # moves the adapters; the streamed weights are there already
        found = train(running, loss, steps=3)
        grown = torch.accelerator.max_memory_allocated() - before
        assert grown < stream.report.weights_bytes / 2
        assert stream.report.call_bytes
    assert same(found, want)
