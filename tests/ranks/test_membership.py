"""Which ranks load together, and how many are on this host."""

from __future__ import annotations

import os

import pytest
import torch

from sluice.ranks.membership import group_of, local_rank_count
from support.joint_loads import load_part, saved, sharded
from support.ranks import Ranks

# The functions that run on ranks import torch.distributed.tensor, which takes as long as all of torch.
# mypy: disable-error-code="no-untyped-call"


def members_of_slices() -> tuple[int, ...] | None:
    """Return the ranks of a model of which this rank holds DTensors on one row of a mesh only."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = group_of([distribute_tensor(torch.zeros(3), mesh["tp"], [Replicate()])])
    return None if group is None else group.ranks


def members_of_plain_tensors() -> object:
    return group_of([torch.zeros(3)])


def members_of_all() -> tuple[int, ...] | None:
    group = group_of(sharded("meta").parameters())
    return None if group is None else group.ranks


def test_ranks_of_a_mesh(two_ranks: Ranks) -> None:
    assert two_ranks.run(members_of_all) == [(0, 1)] * 2


def test_ranks_of_slices_of_a_mesh_load_together(four_ranks: Ranks) -> None:
    assert four_ranks.run(members_of_slices) == [(0, 1, 2, 3)] * 4


def test_plain_tensors(two_ranks: Ranks) -> None:
    assert two_ranks.run(members_of_plain_tensors) == [None, None]


def test_ranks_outside_of_the_mesh_do_not_take_part(four_ranks: Ranks, tmp_path: object) -> None:
    """The ranks of a smaller mesh load without the others, which do something else meanwhile."""
    path = saved(f"{tmp_path}/model.pth")
    assert four_ranks.run(load_part, path, (1, 2)) == [None, (1, 2), (1, 2), None]


def counted(name: str, value: str) -> int:
    os.environ[name] = value
    try:
        return local_rank_count()
    finally:
        del os.environ[name]


@pytest.mark.parametrize(
    ("name", "value", "count"),
    [
        ("UNRELATED", "1", 2),
        ("LOCAL_WORLD_SIZE", "1", 1),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "8", 2),  # from an outer job
        ("SLURM_NTASKS_PER_NODE", "2(x4)", 2),
    ],
)
def test_ranks_of_this_host(two_ranks: Ranks, name: str, value: str, count: int) -> None:
    assert two_ranks.run(counted, name, value) == [count] * 2


def test_without_a_group_the_variables_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_rank_count() == 1
