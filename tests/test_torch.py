"""sluice.torch: the objects of torch.load, from more sources, and what only torch does is refused."""

from __future__ import annotations

import argparse
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice.torch import load, save
from support.oracles import same


def training() -> dict[Any, Any]:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    shared = torch.arange(6.0)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 3,
        "betas": (0.9, 0.95),
        "views": [shared, shared[2:4]],
        "none": None,
        7: "seven",
    }


@pytest.mark.parametrize(
    "value",
    [training, torch.ones(3), [1, torch.ones(2)], (), 3, OrderedDict(a=torch.ones(1))],
    ids=["training", "tensor", "list", "empty", "int", "ordered"],
)
def test_any_object_is_that_of_torch(tmp_path: Path, value: Any) -> None:
    value = value() if callable(value) else value  # here: a backward pass while tests are collected sets up autograd
    torch.save(value, tmp_path / "a.pt")
    assert same(load(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=True))
    assert same(load(io.BytesIO((tmp_path / "a.pt").read_bytes()), map_location="cpu", mmap=True), value)


def test_views_share_their_storage(tmp_path: Path) -> None:
    save(training(), tmp_path / "a.pt")
    whole, part = load(tmp_path / "a.pt")["views"]
    part.zero_()
    assert whole.tolist() == [0, 1, 0, 0, 4, 5]
    assert same(torch.load(tmp_path / "a.pt", weights_only=True)["betas"], (0.9, 0.95))


def test_no_argument_is_offered_that_it_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": torch.zeros(2 << 20)}, tmp_path / "a.pt")
    monkeypatch.setattr("sluice.records.MachineFacts.host_headroom", (22 << 20, "free memory"))
    with pytest.raises(sluice.BudgetError, match=r"sluice\.load_state_dict\(f, dtype=\.\.\.\)\.$"):
        load(tmp_path / "a.pt")


def test_what_needs_code_is_refused(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
    with pytest.raises(sluice.UnsafeContentError, match=r"argparse\.Namespace"):
        load(tmp_path / "a.pt")
    for value in ({"args": argparse.Namespace(lr=1)}, nn.Linear(1, 1)):
        with pytest.raises(sluice.SaveError):
            save(value, tmp_path / "b.pt")
    refused: list[dict[str, Any]] = [{"weights_only": False}, {"map_location": lambda s, _: s}, {"map_location": {}}]
    for arguments in refused:
        with pytest.raises(ValueError, match=r"torch\.load"):
            load(tmp_path / "a.pt", **arguments)
    assert not (tmp_path / "b.pt").exists()
