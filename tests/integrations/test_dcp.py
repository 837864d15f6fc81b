"""dcp.load reads any checkpoint, and dcp.save writes ordinary ones, on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import sluice
from sluice.integrations.dcp import SluiceReader, SluiceWriter
from support.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))


@pytest.mark.parametrize("name", ["m.pth", "m.safetensors", "dcp", "shards"])
def test_any_format_fills_a_state_dict(tmp_path: Path, name: str) -> None:
    saved, filled = network(), network()
    known: dict[str, Any] = {"dcp": {"format": "dcp"}, "shards": {"max_shard_size": 100}}
    sluice.save(saved, tmp_path / name, **known.get(name, {}))
    state = filled.state_dict()
    load(state, storage_reader=SluiceReader(tmp_path / name), no_dist=True)
    assert all(torch.equal(value, saved.state_dict()[key]) for key, value in filled.state_dict().items())


def test_nested_states_and_values(tmp_path: Path) -> None:
    saved, filled = network(), network()
    kinds = (torch.float16, torch.ones(2).shape, 1j, torch.ones(()))
    torch.save({"model": saved.state_dict(), "step": 3, "kinds": kinds}, tmp_path / "run.pt")
    state: dict[str, Any] = {"model": filled.state_dict(), "step": 0, "kinds": None}
    load(state, storage_reader=SluiceReader(tmp_path / "run.pt"), no_dist=True)
    assert (state["step"], state["kinds"]) == (3, kinds)
    assert torch.equal(filled.get_parameter("1.weight"), saved.get_parameter("1.weight"))
    part = network().state_dict()
    load(part, storage_reader=SluiceReader(tmp_path / "run.pt", key="model"), no_dist=True)
    assert torch.equal(part["0.bias"], saved.get_parameter("0.bias"))


@pytest.mark.parametrize("name", ["run.pt", "dcp"])
def test_an_optimizer_is_filled(tmp_path: Path, name: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    dcp: dict[str, Any] = {"checkpoint_id": tmp_path / name}
    target = dcp if name == "dcp" else {"storage_writer": SluiceWriter(tmp_path / name)}
    save({"optim": optimizer.state_dict()}, **target, no_dist=True)
    filled = torch.optim.AdamW(model.parameters())
    filled.step()
    state = {"optim": filled.state_dict()}
    load(state, storage_reader=SluiceReader(tmp_path / name), no_dist=True)
    expected = optimizer.state_dict()
    assert state["optim"]["param_groups"] == expected["param_groups"]
    assert torch.equal(state["optim"]["state"][0]["exp_avg"], expected["state"][0]["exp_avg"])


def test_saves_are_ordinary_files(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": network().state_dict(), "step": 4, "groups": [{"lr": 0.5}]}
    save(state, storage_writer=SluiceWriter(tmp_path / "run.pt"), no_dist=True)
    loaded = torch.load(tmp_path / "run.pt", weights_only=True)
    assert (loaded["step"], loaded["groups"]) == (4, [{"lr": 0.5}])
    assert torch.equal(loaded["model"]["0.weight"], state["model"]["0.weight"])
    with pytest.raises(TypeError, match="DefaultSavePlanner"):
        SluiceWriter(tmp_path / "x.pt").write_data(SavePlan([]), object())  # type: ignore[arg-type]


def divided(path: Path, out: Path) -> bool:
    """Load a file into DTensors with dcp, and save them; on each rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = network()
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    load(state, storage_reader=SluiceReader(path))
    expected = torch.load(path, weights_only=True)
    equal = all(torch.equal(value.full_tensor(), expected[name]) for name, value in state.items())
    save(state, storage_writer=SluiceWriter(out))
    save({"w": torch.ones(2)}, storage_writer=SluiceWriter(out.parent / f"rank {torch.distributed.get_rank()}"))
    return equal


def test_ranks_read_and_write_their_shards(tmp_path: Path, two_ranks: Ranks) -> None:
    torch.save(network().state_dict(), tmp_path / "m.pth")
    assert all(two_ranks.run(divided, tmp_path / "m.pth", tmp_path / "out.safetensors"))
    assert [each.name for each in tmp_path.glob("rank*")] == ["rank 0"]
    assert "kwargs" not in SluiceReader.read_metadata.__code__.co_varnames  # torch would read again, without the others
    written = sluice.load_state_dict(tmp_path / "out.safetensors")
    assert all(torch.equal(written[name], value) for name, value in torch.load(tmp_path / "m.pth").items())
