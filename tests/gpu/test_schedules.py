"""Loads while streams run at other moments and in other orders, compared with the same load to the CPU."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice import rules
from support.oracles import bits
from support.simulated_device import Simulator
from support.trained_net import empty

pytestmark = pytest.mark.gpu

MIB = 1 << 20

SEEDS = [None, 0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and bits(ours) == bits(theirs)


class Net(nn.Module):
    """A model with a tie, layouts, dtypes, a buffer, and tensors that are larger and smaller than staging."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 150)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(150, 150), nn.LayerNorm(150)) for _ in range(4))
        self.conv = nn.Conv2d(16, 32, 3)
        self.wide = nn.Parameter(torch.randn(600_001))
        self.register_buffer("steps", torch.arange(1000))
        self.head = nn.Linear(150, 2000, bias=False)
        self.head.weight = self.embedding.weight


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    state = build().state_dict()
    state["blocks.1.0.weight"] = state["blocks.1.0.weight"].t().contiguous().t()  # a view with other strides
    torch.save(state, tmp_path / "f.pth")
    return tmp_path / "f.pth"


def load(model: nn.Module, file: Path, **arguments: Any) -> sluice.LoadReport:
    wanted = [
        rules.scale("blocks.0.0.weight", 0.5),
        rules.transpose("blocks.2.0.weight"),
        rules.resize("blocks.3.1.bias", 150, fill=1.0),
    ]
    return sluice.load_into(
        model, file, rules=wanted, memory=sluice.MemoryLimits(staging="1MiB"), **{"dtype": None, **arguments}
    )


def assert_equals_the_cpu(model: nn.Module, file: Path, **arguments: Any) -> None:
    expected = build(seed=1)
    load(expected, file, **arguments)
    wanted = expected.state_dict()
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, wanted[name]), name


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
def test_the_bits_are_those_of_the_cpu_in_any_order(
    file: Path, device: str, sim: Simulator, seed: int | None, dtype: Any, live: bool
) -> None:
    sim.schedule(seed)
    model = build(seed=1).to(device)
    model.head.weight = model.embedding.weight
    torch.accelerator.synchronize()
    old = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    busy = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # queued, reads the live tensors
    if live:
        load(model, file, dtype=dtype)
    else:
        model = empty(build)
        load(model, file, device=device, dtype=dtype)
    seen = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # queued after the load
    assert_equals_the_cpu(model, file, dtype=dtype)
    for name, tensor in model.state_dict().items():
        assert same_bits(seen[name], tensor.cpu()), name
        assert same_bits(busy[name], old[name]), name
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("seed", [None, 0])
def test_parts_go_to_both_devices_and_the_host(
    file: Path, device: str, second_device: str, sim: Simulator, seed: int | None
) -> None:
    sim.schedule(seed)
    model = empty(build)
    places = {"": "cpu", "blocks.0": device, "blocks.1": second_device, "conv": second_device, "wide": device}
    report = load(model, file, device=places, dtype=torch.bfloat16)
    assert report.devices == ("cpu", device, second_device)
    for name, parameter in model.named_parameters():
        prefix = max((each for each in places if name.startswith(each)), key=len)
        assert str(parameter.device) == places[prefix]
    assert_equals_the_cpu(model, file, dtype=torch.bfloat16)
    assert sim.page_locked_bytes()[0] == 0


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_two_loads_at_once_on_two_devices(
    file: Path, device: str, second_device: str, sim: Simulator, seed: int | None
) -> None:
    sim.schedule(seed)
    devices, expected = (device, second_device), torch.load(file, weights_only=True)

    def load_on(where: str) -> OrderedDict[str, torch.Tensor]:
        return sluice.load_state_dict(file, device=where, memory=sluice.MemoryLimits(staging="1MiB"))

    with ThreadPoolExecutor(2) as pool:
        for where, loaded in zip(devices, pool.map(load_on, devices), strict=True):
            for name, tensor in loaded.items():
                assert str(tensor.device) == where
                assert torch.equal(tensor.cpu(), expected[name])
    assert sim.page_locked_bytes()[0] == 0
