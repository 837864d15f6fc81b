"""The state of each of torch's optimizers in each other one: what loads trains on, the rest is refused, unchanged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import sluice
from support.oracles import same

OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}}
KINDS = sorted(
    name
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
)


def made(kind: str, *, steps: int) -> optim.Optimizer:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4)) for _ in range(2)]
    optimizer: optim.Optimizer = getattr(optim, kind)(parameters, **OPTIONS.get(kind, {}))
    for _ in range(steps):
        step(optimizer)
    return optimizer


def step(optimizer: optim.Optimizer) -> None:
    parameters = optimizer.param_groups[0]["params"]

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = sum((parameter**2).sum() for parameter in parameters)
        assert isinstance(total, torch.Tensor)
        total.backward()  # type: ignore[no-untyped-call]
        if isinstance(optimizer, optim.SparseAdam):
            for parameter in parameters:
                parameter.grad = parameter.grad.to_sparse()
        return total

    loss()
    optimizer.step(loss)  # type: ignore[arg-type]  # a tensor, as in torch's own examples


@pytest.mark.parametrize("own", KINDS)
@pytest.mark.parametrize("saved", KINDS)
def test_a_state_loads_and_trains_or_is_refused(saved: str, own: str, tmp_path: Path) -> None:
    torch.save(made(saved, steps=2).state_dict(), tmp_path / "f.pt")
    optimizer = made(own, steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    try:
        sluice.load_optimizer(optimizer, tmp_path / "f.pt")
    except sluice.MismatchError as error:
        assert saved != own
        assert f"which {own} needs" in str(error)
        assert same(optimizer.state_dict(), before)
        return
    torch_own = made(own, steps=1)
    torch_own.load_state_dict(torch.load(tmp_path / "f.pt"))
    assert same(optimizer.state_dict(), torch_own.state_dict())
    step(optimizer)


def test_an_optimizer_whose_own_code_fails_is_unchanged(tmp_path: Path) -> None:
    class Own(optim.Adam):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
            raise KeyError("own")

    torch.save(made("Adam", steps=2).state_dict(), tmp_path / "f.pt")
    optimizer = Own([nn.Parameter(torch.randn(3, 4)) for _ in range(2)])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(sluice.MismatchError, match=r"of Own raised KeyError: 'own'; the optimizer is unchanged"):
        sluice.load_optimizer(optimizer, tmp_path / "f.pt")
    assert same(optimizer.state_dict(), before)
