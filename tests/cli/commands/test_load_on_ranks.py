"""``sluice load --mesh``: the ranks of a launcher load a model that the command divides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import sluice
from sluice.cli.divided_models import divide
from support.command_line import run_command
from support.ranks import Ranks


class Net(nn.Module):
    tp_plan = {"table": "rowwise", "up": "colwise", "down": "rowwise"}  # noqa: RUF012  as transformers writes it

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 6)
        self.down = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)


def loaded(path: str, mesh: dict[str, int]) -> bool:
    """Divide, load, gather, and compare with the file."""
    with torch.device("meta"):
        model = divide(Net(), mesh, None)
    sluice.load_into(model, path)
    truth = torch.load(path, weights_only=True)
    found = model.state_dict()
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}
    return all(torch.equal(whole[name], tensor) for name, tensor in truth.items())


def command(*arguments: str) -> tuple[int, str, str]:
    result = run_command(*arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("on_ranks") / "net.pth"
    torch.save(Net().state_dict(), path)
    return path


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"ddp": 2, "dp": 2}, {"ddp": 2, "tp": 2}, {"dp": 4}])
def test_a_model_is_divided_as_its_mesh_says(four_ranks: Ranks, checkpoint: Path, mesh: dict[str, int]) -> None:
    assert four_ranks.run(loaded, str(checkpoint), mesh) == [True] * 4


@pytest.mark.long
@pytest.mark.ranks
def test_three_dimensions_of_eight_ranks(checkpoint: Path) -> None:
    """Copies of FSDP2 over tensor parallelism; a rank holds an eighth, or less of 11 and 6 rows."""
    with Ranks(8) as ranks:
        assert ranks.run(loaded, str(checkpoint), {"ddp": 2, "dp": 2, "tp": 2}) == [True] * 8
        assert ranks.run(loaded, str(checkpoint), {"dp": 8}) == [True] * 8


def test_the_first_rank_prints_the_report(two_ranks: Ranks, checkpoint: Path) -> None:
    model = f"{Net.__module__}:Net"
    results: list[Any] = two_ranks.run(command, "load", str(checkpoint), "--model", model, "--mesh", "tp=2", "--json")
    assert [code for code, _, _ in results] == [0, 0], results
    assert len(json.loads(results[0][1])["ranks"]) == 2
    assert results[1][1] == ""


def test_a_mesh_must_have_the_ranks_that_were_started(two_ranks: Ranks, checkpoint: Path) -> None:
    model = f"{Net.__module__}:Net"
    results: list[Any] = two_ranks.run(command, "load", str(checkpoint), "--model", model, "--mesh", "dp=3")
    assert [code for code, _, _ in results] == [2, 2]
    assert "the mesh has 3 ranks, and the launcher started 2" in results[0][2]


def test_a_mesh_needs_a_launcher(directory: Path) -> None:
    torch.save(Net().state_dict(), "net.pth")
    result = run_command("load", "net.pth", "--model", "cli_model:Net", "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "torchrun --nproc-per-node 2 -m sluice load" in result.stderr
    assert run_command("load", "net.pth", "--model", "cli_model:Net", "--tp-plan", "{}").exit_code == 2
