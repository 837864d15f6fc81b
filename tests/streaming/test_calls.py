"""The blocks that are expected after a call, and reads of models whose blocks have lists of modules in them."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from sluice.streaming.calls import CallOrder
from support.streamed_models import WIDTH, empty, saved


class _Stage(nn.Module):
    """Layers whose sizes differ, of which some are so small that they stay in memory."""

    def __init__(self, count: int) -> None:
        super().__init__()
        wide = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)]
        self.layers = nn.ModuleList([nn.LayerNorm(WIDTH), *wide, nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, most: int | None) -> torch.Tensor:
        for layer in self.layers[:most]:
            x = layer(x)
        return x


class Stages(nn.Module):
    """Stages as in vision models."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(_Stage(count) for count in (1, 3, 2))

    def forward(self, x: torch.Tensor, most: int | None = None) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x, most)
        return x


@pytest.mark.parametrize("share", [0.25, 0.35, 0.6, 0.9])
def test_a_call_reads_what_does_not_stay_and_all_of_it_ahead(file: Path, share: float) -> None:
    model, running = saved(Stages, file), empty(Stages)
    x, nbytes = torch.randn(2, WIDTH), sum(parameter.nbytes for parameter in model.parameters())
    with torch.inference_mode(), sluice.stream(running, file, memory=int(nbytes * share)) as stream:
        for _ in range(2):
            running(x)
        before = stream.report
        for _ in range(4):
            assert torch.equal(running(x), model(x))
        after = stream.report
        for most in (2, 2, None, 2):  # the lists inside of blocks stay until a member is skipped
            assert torch.equal(running(x, most), model(x, most))
    assert after.misses == before.misses
    assert after.read_bytes - before.read_bytes == 4 * after.call_bytes
    largest = 2 * WIDTH * WIDTH * 4  # one of them is in use while the next is read
    assert after.call_bytes <= nbytes * (1 - share) + 3 * largest


def _after(order: CallOrder, *calls: int) -> list[int]:
    for call in calls:
        order.note(call)
    return list(islice(order.upcoming(), 5))


def test_the_first_call_follows_the_definition_and_wraps_around() -> None:
    assert _after(CallOrder([0, 1, 2, 3], 8)) == [0, 1, 2, 3]
    assert _after(CallOrder([0, 1, 2, 3], 8), 0, 1) == [2, 3, 0, 1]


def test_one_step_back_in_the_first_call_is_no_backward_pass() -> None:
    order = CallOrder([0, 1, 2, 3], 8)
    assert _after(order, 0, 2) == [1, 3, 0, 1, 2]
    assert _after(order, 1) == [2, 3, 0, 1]
    order.note(3)
    order.note(3, part=True)
    assert list(islice(order.upcoming(), 5)) == [2, 1, 0, 0, 1]
    assert _after(order, 2)[:2] == [1, 0]  # activations that are computed again


def test_later_calls_follow_the_call_before() -> None:
    order = CallOrder([0, 1, 2, 3], 8)
    assert _after(order, 3, 1, 0, 3, 1)[:3] == [0, 3, 1]
    assert _after(order, 2) == [3, 0, 1, 2]  # never seen after 1: the definition again
    assert _after(CallOrder([0, 1, 2], 8), 0, 1, 1, 2, 0, 1)[:2] == [1, 2]  # a block that is repeated


def test_old_calls_are_forgotten() -> None:
    order = CallOrder([0, 1], 8)
    _after(order, 7, 8, *[0, 1] * 40, 7)
    assert _after(order, 8) == [0, 1]


def test_what_is_kept_and_expected_is_bounded_with_many_experts() -> None:
    order, choose = CallOrder([0], 60), random.Random(5)
    calls = [choose.randrange(1, 60) for _ in range(5000)]
    _after(order, *calls[:-400], 0, 0, *calls[-400:], 0, 0)
    assert list(order.upcoming()) == calls[-400:-340]
    assert len(order._last) <= 2 * 8 * 60


def test_the_first_backward_pass_goes_against_the_definition() -> None:
    order = CallOrder([0, 1, 2, 3], 8, returns=True)
    assert _after(order, 0, 1, 2) == [3, 3, 2, 1, 0]
    assert _after(order, 3, 3) == [2, 1, 0, 0, 1]
