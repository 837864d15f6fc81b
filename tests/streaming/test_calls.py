"""Reads of models whose blocks have lists of modules in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from support.streamed_models import WIDTH, empty, saved


class _Stage(nn.Module):
    """Layers whose sizes differ, of which some are so small that they stay in memory."""

    def __init__(self, count: int) -> None:
        super().__init__()
        wide = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)]
        self.layers = nn.ModuleList([nn.LayerNorm(WIDTH), *wide, nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stages(nn.Module):
    """Stages as in vision models."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(_Stage(count) for count in (1, 3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


@pytest.mark.parametrize("share", [0.25, 0.35, 0.6, 0.9])
def test_a_call_reads_what_does_not_stay_and_all_of_it_ahead(tmp_path: Path, share: float) -> None:
    model, running = saved(Stages, tmp_path / "model.pth"), empty(Stages)
    x, nbytes = torch.randn(2, WIDTH), sum(parameter.nbytes for parameter in model.parameters())
    with torch.inference_mode(), sluice.stream(running, tmp_path / "model.pth", memory=int(nbytes * share)) as stream:
        for _ in range(2):
            running(x)
        before = stream.report
        for _ in range(4):
            assert torch.equal(running(x), model(x))
        after = stream.report
    assert after.misses == before.misses
    assert after.read_bytes - before.read_bytes == 4 * after.call_bytes
    largest = 2 * WIDTH * WIDTH * 4  # one of them is in use while the next is read
    assert after.call_bytes <= nbytes * (1 - share) + 3 * largest
