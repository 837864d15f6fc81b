"""load_checkpoint_and_dispatch: as accelerate's, with strict weights; its optimizers resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sluice

pytest.importorskip("accelerate")

from accelerate import Accelerator

from sluice.integrations.accelerate import load_checkpoint_and_dispatch
from support.trained_net import empty
from support.training_runs import KINDS, differences, stopped


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(net().state_dict(), tmp_path / "m.pth")
    return tmp_path / "m.pth"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("device_map", [None, "auto", "sequential", {"": "cpu"}, {"0": "cpu", "1": "cpu"}])
def test_a_model_is_filled_and_runs(path: Path, device_map: str | dict[str, str] | None) -> None:
    model = load_checkpoint_and_dispatch(empty(net), path, device_map=device_map, dtype="bf16")
    expected = torch.load(path)["1.weight"].to(torch.bfloat16)
    assert torch.equal(model.get_parameter("1.weight"), expected)
    assert model(torch.ones(1, 4, dtype=torch.bfloat16)).shape == (1, 2)


def test_disk_and_missing_weights_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="balanced_low_0"):
        load_checkpoint_and_dispatch(empty(net), path, device_map="cuda:1")
    with pytest.raises(ValueError, match=r"sluice\.stream"):
        load_checkpoint_and_dispatch(empty(net), path, device_map={"0": "cpu", "1": "disk"})
    with pytest.raises(sluice.MismatchError):
        load_checkpoint_and_dispatch(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2)), path)


def test_a_prepared_optimizer_resumes(tmp_path: Path) -> None:
    model, optimizer = stopped(tmp_path / "run.pt", KINDS["AdamW"])
    prepared = Accelerator().prepare_optimizer(KINDS["AdamW"](model))
    sluice.load_optimizer(prepared, tmp_path / "run.pt")
    assert not differences(prepared.state_dict(), optimizer.state_dict())
