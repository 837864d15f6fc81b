"""Ranks that load together: which they are, and how they are compared before any of them reads."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from msgspec.structs import replace

from sluice.ranks.judgement import Proposal, judge_proposals
from sluice.ranks.membership import local_rank_count
from support.joint_loads import load_part, saved
from support.ranks import Ranks

# The functions that run on ranks import torch.distributed.tensor, which takes as long as all of torch.
# mypy: disable-error-code="no-untyped-call"

_MIB = 1 << 20

PROPOSAL = Proposal(
    host="a",
    hostname="node-a",
    files=(("/data/model.pth", 100, ""),),
    index="1f",
    contents="3d",
    arguments={"dtype": "None"},
    requested="2e",
    growth_bytes=10 * _MIB,
    limit_bytes=20 * _MIB,
    limit_origin="free memory",
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"arguments": {"dtype": "bfloat16"}}, "was called with dtype=bfloat16, rank 0 with dtype=None"),
        ({"files": (("/data/model.pth", 100, "v2"),)}, "has version v2 of /data/model.pth, rank 0 version "),
        ({"contents": "4e"}, "a different version of the files than rank 0"),
        (
            {"files": (("/mnt/model.pth", 99, ""),)},
            "/mnt/model.pth with 99 bytes, rank 0 /data/model.pth with 100 bytes",
        ),
        ({"files": ()}, "a checkpoint of 0 files, rank 0 one of 1"),
        ({"index": "3d"}, "different headers"),
        ({"requested": "3d"}, "other names, shapes or dtypes"),
    ],
)
def test_a_rank_that_differs(change: dict[str, object], text: str) -> None:
    found = judge_proposals({0: PROPOSAL, 1: PROPOSAL, 2: replace(PROPOSAL, **change)})
    assert list(found) == [2]
    assert text in found[2]
    unconnected = {rank: replace(PROPOSAL, **own, meshes=((rank,),)) for rank, own in enumerate([{}, change])}
    assert judge_proposals(unconnected) == {}  # ranks that no mesh connects hold different models


def test_the_ranks_of_a_host_share_its_smallest_limit() -> None:
    tight = replace(PROPOSAL, limit_bytes=19 * _MIB, limit_origin="left in the control group")
    files = (("/mnt/model.pth", 100, ""),)
    elsewhere = replace(PROPOSAL, host="b", hostname="node-b", files=files, growth_bytes=20 * _MIB)
    assert judge_proposals({0: PROPOSAL, 1: elsewhere}) == {}
    found = judge_proposals({0: PROPOSAL, 1: tight, 2: elsewhere})
    assert found == dict.fromkeys(
        (0, 1),
        "the ranks 0, 1 of host node-a together need 20.0 MiB of host memory; expected at most 19.0 MiB "
        "(left in the control group)",
    )


def test_ranks_outside_of_the_mesh_do_not_take_part(four_ranks: Ranks, tmp_path: object) -> None:
    """The ranks of a smaller mesh load without the others, which do something else meanwhile."""
    path = saved(f"{tmp_path}/model.pth")
    assert four_ranks.run(load_part, path, (1, 2)) == [None, (1, 2), (1, 2), None]


def counted(name: str, value: str) -> int:
    with mock.patch.dict(os.environ, {name: value}):
        return local_rank_count()


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
