"""Tensors that the module keeps have, under ``empty_init``, the values of ordinary construction, or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
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


KEPT = {
    "scripted function": lambda module: keep(module, script(affine)(torch.ones(3))),
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


def test_compiled_modules_with_weights_are_refused() -> None:
    with sluice.empty_init(), pytest.raises(sluice.EmptyInitError, match="needs the values of"):
        Built(lambda _: script(Gated())(torch.ones(3)))


COMPUTED = {
    "scripted": lambda module: keep(module, script(affine)(module.weight.detach())),
    "vmap": lambda module: keep(module, torch.func.vmap(plus_one)(module.weight.detach())),
    "like": lambda module: keep(module, torch.ones_like(module.weight)),
    "attribute": lambda module: setattr(module, "kept", [module.weight.detach() * 2]),
}


@pytest.mark.parametrize("build", COMPUTED.values(), ids=COMPUTED)
def test_tensors_computed_from_weights_are_named_by_a_load(build: Callable[[nn.Module], None], tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(4)}, tmp_path / "f.pth")
    with sluice.empty_init():
        model = Built(build)
    with pytest.raises(sluice.MismatchError, match=r"'kept' .*compute it after loading"):
        sluice.load_into(model, tmp_path / "f.pth")
