"""Models that are streamed through a device that does not hold them."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import pytest
import torch

import sluice
from support import fresh_process
from support.simulated_device import Simulator
from support.streamed_models import IDS, Layers, block_bytes, empty, saved

pytestmark = pytest.mark.gpu

Deep = partial(Layers, count=24)


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


#: Trains adapters of a loaded and of a streamed model; torch knows only devices that were there before the first
#: backward pass of a process.
_TRAIN = """
import sys, torch, sluice
from functools import partial
from support.simulated_device import plugged_in
from support.streamed_models import Layers, adapt, block_bytes, empty, same, train

make, path = partial(Layers, count=24), sys.argv[1]
with plugged_in() as sim:
    sim.schedule(1)
    ids = torch.tensor([[1, 2, 3, 999]], device="sim")
    loss = lambda model: model(ids).logsumexp(-1).mean()
    model = empty(make).requires_grad_(False)
    sluice.load_into(model, path, device="sim")
    expected = train(adapt(model, ["0"]).to("sim"), loss, steps=3)
    del model
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    running, memory = empty(make).requires_grad_(False), sluice.MemoryLimits(device=4 * block_bytes())
    with sluice.stream(running, path, memory=memory, device="sim", train=True) as stream:
        adapt(running, ["0"]).to("sim")  # moves the adapters; the streamed weights are there already
        assert same(train(running, loss, steps=3), expected)
        assert stream.report.call_bytes
        assert torch.accelerator.max_memory_allocated() - before < stream.report.weights_bytes / 2
"""


@pytest.mark.usefixtures("fresh_processes", "sim")
def test_adapters_are_trained_as_in_the_memory_of_the_device(tmp_path: Path) -> None:
    saved(Deep, tmp_path / "model.pth")
    done = fresh_process.run(_TRAIN, tmp_path / "model.pth")
    assert not done.returncode, done.stderr
