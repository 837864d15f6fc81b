"""Which ranks load together, and how many are on this host."""

from __future__ import annotations

import os

import pytest

from sluice.ranks.membership import local_rank_count
from support.joint_loads import load_part, saved
from support.ranks import Ranks

# The functions that run on ranks import torch.distributed.tensor, which takes as long as all of torch.
# mypy: disable-error-code="no-untyped-call"


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
