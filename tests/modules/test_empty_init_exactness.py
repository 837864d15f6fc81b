"""Tensors that the module keeps have, under ``empty_init``, the values of ordinary construction, or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sluice


class Built(nn.Module):
    """A module with one parameter, built by a function."""

    def __init__(self, build: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        build(self)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0) * 2


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate


def affine(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def script(what: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is (deprecated|not supported)")  # category by version
        return torch.jit.script(what)


def keep(module: nn.Module, value: torch.Tensor) -> None:
    module.register_buffer("kept", value, persistent=False)


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def assign_item(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tensor[1] = value
    return tensor


def total(module: Any) -> Any:
    return module.weight.detach().sum()


KEPT = {
    "scalar add_": lambda module: keep(module, torch.tensor(2.0).add_(total(module))),
    "scalar +=": lambda module: keep(module, torch.tensor(2.0).__iadd__(total(module))),
    "scalar out=": lambda module: keep(module, torch.add(total(module), 1, out=torch.tensor(2.0))),
    "item": lambda module: keep(module, assign_item(torch.arange(3.0), total(module))),
    "fill_": lambda module: keep(module, torch.arange(3.0).fill_(total(module))),
    "constant_": lambda module: keep(module, nn.init.constant_(torch.arange(3.0), total(module))),
    "scripted function": lambda module: keep(module, script(affine)(torch.ones(3))),
    "scripted function of a weight": lambda module: keep(module, script(affine)(module.weight.detach())),
    "scripted module": lambda module: keep(module, script(Scaled())(torch.ones(3))),
    "vmap": lambda module: keep(module, torch.func.vmap(plus_one)(torch.ones(3))),
    "vmap on meta": lambda module: keep(
        module, torch.zeros(torch.func.vmap(plus_one)(torch.ones(3, device="meta")).shape)
    ),
    "grad": lambda module: keep(module, torch.func.grad(lambda x: (x * x).sum())(torch.ones(3))),
}


@pytest.mark.parametrize("build", KEPT.values(), ids=KEPT)
def test_kept_tensors_have_the_values_of_ordinary_construction(build: Callable[[nn.Module], None]) -> None:
    expected = Built(build)
    with sluice.empty_init():
        model = Built(build)
    assert model.weight.is_meta
    assert torch.equal(model.get_buffer("kept"), expected.get_buffer("kept"))


REFUSED = {
    "scripted module": lambda _: script(Gated())(torch.ones(3)),
    "vmap": lambda module: torch.func.vmap(plus_one)(module.weight),
}


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED)
def test_transforms_of_weights_are_refused(build: Callable[[nn.Module], None]) -> None:
    with sluice.empty_init(), pytest.raises(sluice.EmptyInitError, match="needs the values of"):
        Built(build)
