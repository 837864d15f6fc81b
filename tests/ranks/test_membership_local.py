"""The number of ranks on this host, from launchers and from the process group."""

from __future__ import annotations

import os

import pytest

from sluice.ranks.membership import local_rank_count
from support.ranks import Ranks


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
