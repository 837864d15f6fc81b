"""Lazy modules take their shapes from the checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice


@pytest.fixture(autouse=True)
def _lazy_modules_warn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Lazy modules.*")
        yield


def build() -> Any:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2, bias=False))


def save(path: Path) -> nn.Sequential:
    model: nn.Sequential = build()
    model(torch.randn(4, 5))
    torch.save(model.state_dict(), path)
    return model


@pytest.mark.parametrize("where", ["live", "meta", "empty"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_lazy_modules_are_materialised_and_stay_the_same_objects(
    where: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    expected = save(tmp_path / "f.pth")
    if where == "empty":
        with sluice.empty_init():
            model = build()
    else:
        with torch.device("meta" if where == "meta" else "cpu"):
            model = build()
    held = [*model.parameters()]
    optimizer = torch.optim.SGD(held, lr=0.1) if where == "live" else None
    sluice.load_into(model, tmp_path / "f.pth", dtype=dtype)
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert {type(parameter) for parameter in held} == {nn.Parameter}
    for name, tensor in model.state_dict().items():
        other = expected.state_dict()[name]
        assert torch.equal(tensor, other.to(tensor.dtype)), name
    x = torch.randn(4, 5, dtype=dtype)
    model(x).sum().backward()
    assert type(model[0]) is nn.Linear
    theirs = build()
    theirs.load_state_dict(expected.state_dict())
    theirs(x.float())
    assert model[0].in_features == theirs[0].in_features  # 0 in torch 2.6
    assert held[0].grad is not None
    if optimizer is not None:
        optimizer.step()


def test_what_the_checkpoint_lacks_is_missing_or_stays_lazy(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in save(tmp_path / "f.pth").state_dict().items() if name != "0.weight"}
    torch.save(state, tmp_path / "f.pth")
    model = build()
    with pytest.raises(sluice.MismatchError, match=r"not in the checkpoint \(1\):\n    '0\.weight'\n"):
        sluice.load_into(model, tmp_path / "f.pth")
    assert nn.parameter.is_lazy(model[0].weight)
    assert nn.parameter.is_lazy(model[2].weight)
    report = sluice.load_into(model, tmp_path / "f.pth", strict=False)
    assert report.missing == ("0.weight",)
    assert nn.parameter.is_lazy(model[0].weight)
    assert tuple(model[2].weight.shape) == (2, 3)
