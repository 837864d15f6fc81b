"""Weights that a model, its hooks and its caller compute, replace and add while it is streamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice._errors import MismatchError, StreamError
from support.streamed_models import IDS, WIDTH, Layers, block_bytes, empty, saved

pytestmark = pytest.mark.usefixtures("inference")


class _Prepared(nn.Module):
    """Layers that compute from their weights after a load."""

    def __init__(self, prepare: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.prepare = nn.Linear(WIDTH, WIDTH), prepare
        self.prepared: Any = None
        self.scale: Any = None
        self.register_load_state_dict_post_hook(lambda *_: setattr(self, "prepared", prepare(self.a.weight)))  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> float:
        return 2.0

    def set_extra_state(self, state: float) -> None:
        self.scale = state * self.a.weight.abs().max()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.prepared if isinstance(self.prepared, torch.Tensor) else self.prepared * self.a.weight
        result: torch.Tensor = self.scale * nn.functional.linear(x, weight, self.a.bias)
        return result


@pytest.mark.parametrize(
    "prepare", [lambda weight: 2 * weight, torch.Tensor.detach, lambda weight: weight[0, 0].item()]
)
def test_what_a_model_computes_from_weights_after_a_load_is_right(
    file: Path, prepare: Callable[[torch.Tensor], Any]
) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*[_Prepared(prepare) for _ in range(6)])

    model, running, x = saved(make, file), empty(make), torch.randn(2, WIDTH)
    sluice.load_into(model, file)
    with sluice.stream(running, file, memory=3 * block_bytes()) as stream:
        assert torch.equal(running(x), model(x))
        assert stream.report.call_bytes
    sluice.load_into(running, file)
    assert torch.equal(running(x), model(x))
    assert running.state_dict().keys() == model.state_dict().keys()


def test_a_hook_that_ties_weights_keeps_none_of_the_stream(file: Path) -> None:
    def make() -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        model.register_load_state_dict_post_hook(lambda *_: setattr(model[3], "weight", model[2].weight))  # type: ignore[no-untyped-call]
        return model

    model, x = make(), torch.randn(2, WIDTH)
    model.load_state_dict(model.state_dict())
    torch.save(model.state_dict(), file)
    running = empty(make)
    for _ in range(2):
        with sluice.stream(running, file, memory=3 * block_bytes()), torch.no_grad():
            assert torch.equal(running(x), model(x))
    sluice.load_into(running, file)
    assert torch.equal(running(x), model(x))


def test_a_failure_of_what_a_model_does_after_a_load_ends_the_stream(
    file: Path, model: Layers, running: Layers
) -> None:
    hook = running.register_load_state_dict_post_hook(lambda *_: running.linear(1).weight.zero_())  # type: ignore[no-untyped-call]
    with pytest.raises(StreamError, match=r"the stream ended: .*cannot change its weights"):
        sluice.stream(running, file, memory=3 * block_bytes())
    with pytest.raises(StreamError, match="not in memory"):
        running(IDS)
    hook.remove()
    sluice.load_into(running, file)
    assert torch.equal(running(IDS), model(IDS))


def test_weights_that_the_caller_replaces_are_used_and_kept(file: Path, model: Layers, running: Layers) -> None:
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    given = dict(zeros)
    with sluice.stream(running, file, memory=3 * block_bytes()):
        running(IDS)
        assert not torch.func.functional_call(running, given, (IDS,)).any()
        assert all(given[name] is zero for name, zero in zeros.items())
        assert torch.equal(running(IDS), model(IDS))
        own = nn.Parameter(torch.randn(WIDTH, WIDTH))
        running.linear(1).weight = model.linear(1).weight = own
        running.linear(3).weight = running.linear(2).weight  # tied now
        model.linear(3).weight = model.linear(2).weight
        running.embedding.weight = model.embedding.weight
        torch.utils.swap_tensors(running.linear(4).weight, nn.Parameter(torch.zeros(WIDTH, WIDTH)))  # type: ignore[no-untyped-call]
        model.linear(4).weight.data.zero_()
        for _ in range(2):
            assert torch.equal(running(IDS), model(IDS))
    assert running.linear(1).weight is own
    assert not running.linear(4).weight.any()


def test_freezing_and_loading_other_weights_while_it_is_streamed(file: Path, model: Layers, running: Layers) -> None:
    with sluice.stream(running, file, memory=3 * block_bytes()):
        for parameter in running.parameters():
            parameter.requires_grad = False
        running.add_module("adapter", nn.Linear(2, 2))
        running.load_state_dict({"adapter.bias": torch.ones(2)}, strict=False)
        assert torch.equal(running(IDS), model(IDS))
        assert not any(parameter.requires_grad for parameter in running.layers.parameters())
    assert not any(parameter.requires_grad for parameter in running.layers.parameters())


def test_parameters_that_the_checkpoint_does_not_have_stay_in_memory(
    file: Path, model: Layers, running: Layers
) -> None:
    running.add_module("adapter", nn.Linear(WIDTH, WIDTH))
    with pytest.raises(MismatchError, match=r"adapter\.weight"):
        sluice.stream(running, file, memory=3 * block_bytes())
    own = running.get_parameter("adapter.weight").clone()
    with sluice.stream(running, file, memory=3 * block_bytes(), strict=False) as stream:
        assert "not in the checkpoint (2): adapter.weight, adapter.bias" in str(stream)
        state = running.state_dict()
        running.load_state_dict({"adapter.bias": torch.ones(WIDTH)}, strict=False)
        assert torch.equal(running(IDS), model(IDS))
    assert torch.equal(running.get_parameter("adapter.weight"), own)
    assert torch.equal(state["adapter.weight"], own)
    with pytest.raises(StreamError, match="any more"):
        state["layers.1.0.weight"].sum()
