from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from sluice.matching.placement import device_of


def test_the_longest_prefix_of_whole_components_wins() -> None:
    placement = {"": "cpu", "blocks": "cuda:0", "blocks.1": "cuda:1"}
    names = ["head.weight", "blocks.0.weight", "blocks.1.weight", "blocks.10.weight", "blocks"]
    assert [device_of(name, placement) for name in names] == ["cpu", "cuda:0", "cuda:1", "cuda:0", "cuda:0"]
    assert device_of("head.weight", {"blocks": "cuda:0"}) is None


def test_a_mapping_of_devices_is_accepted_in_place_of_a_device(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.save(model.state_dict(), tmp_path / "f.pth")
    with sluice.empty_init():
        empty = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    report = sluice.load_into(empty, tmp_path / "f.pth", device={"0": "cpu", "1": torch.device("cpu")})
    assert report.devices == ("cpu",)
    assert torch.equal(empty.get_parameter("1.weight"), model.get_parameter("1.weight"))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta", {"": "meta"}])
def test_a_device_that_cannot_be_used_is_named_before_anything_is_read(tmp_path: Path, device: object) -> None:
    torch.save({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, tmp_path / "f.pth")
    with sluice.empty_init():
        model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"cannot (be used|hold weights)"):
        sluice.load_into(model, tmp_path / "f.pth", device=device)  # type: ignore[arg-type]
    assert model.weight.is_meta
