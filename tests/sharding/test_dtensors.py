"""Descriptions of DTensors, compared with the local tensors that torch made of numbered elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sluice.sharding.dtensors import UndescribedError, is_dtensor, local_of, region_held, sharding_of, with_local
from sluice.sharding.regions import Region
from support.ranks import Ranks

# The functions that run on ranks import torch.distributed.tensor, which takes as long as all of torch.
# mypy: disable-error-code="no-untyped-call"


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(tuple(shape))


def selected(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, intervals in enumerate(region):
        positions = [position for start, stop in intervals for position in range(start, stop)]
        tensor = tensor.index_select(dim, torch.tensor(positions, dtype=torch.int64))
    return tensor


def described(mesh_shape: tuple[int, ...], shape: tuple[int, ...], placements: str) -> bool:
    """Divide a tensor with torch; return whether the region of this rank selects its local tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    kinds = [Replicate() if mark == "R" else Shard(int(mark)) for mark in placements]
    tensor = distribute_tensor(numbered(shape), init_device_mesh("cpu", mesh_shape), kinds)
    return torch.equal(selected(numbered(shape), region_held(tensor)), local_of(tensor))


@pytest.mark.parametrize(
    ("mesh", "shape", "placements"),
    [
        ((4,), (10, 3), "0"),
        ((4,), (2, 3), "0"),
        ((4,), (3, 7), "1"),
        ((2, 2), (5, 3), "00"),
        ((2, 2), (5, 3), "R1"),
        ((4,), (), "R"),
    ],
)
def test_local_tensors_of_torch(
    four_ranks: Ranks, mesh: tuple[int, ...], shape: tuple[int, ...], placements: str
) -> None:
    assert four_ranks.run(described, mesh, shape, placements) == [True] * 4


def of_part_of_the_ranks() -> tuple[tuple[int, ...] | None, tuple[int, ...], bool]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(numbered((5, 3)), DeviceMesh("cpu", [1, 3]), [Shard(0)])
    region = region_held(tensor)
    return sharding_of(tensor).coordinate, region[0][0] if region[0] else (), local_of(tensor).numel() == 0


def test_ranks_outside_of_the_mesh_hold_nothing(four_ranks: Ranks) -> None:
    nothing = (None, (), True)
    assert four_ranks.run(of_part_of_the_ranks) == [nothing, ((0,), (0, 3), False), nothing, ((1,), (3, 5), False)]


def refusals() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.placement_types import Placement

    class Odd(Placement):
        pass

    mesh, local = init_device_mesh("cpu", (2,)), torch.zeros(2, 3)
    wrong: Any = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((4, 3)), stride=(3, 1))
    wrong._local_tensor = torch.zeros(4, 3)
    odd: Any = DTensor.from_local(local, mesh, [Shard(0)])
    odd._spec.placements = (Odd(),)
    texts = []
    for tensor in (DTensor.from_local(local, mesh, [Partial()]), odd, wrong):
        try:
            region_held(tensor)
        except UndescribedError as error:
            texts.append(str(error))
    return texts


def test_what_is_not_elements_of_the_tensor_is_refused(two_ranks: Ranks) -> None:
    for partial, odd, wrong in two_ranks.run(refusals):
        assert "Partial(sum): its ranks hold summands" in partial
        assert "Odd" in odd
        assert "sluice does not know" in odd
        assert "local tensor of shape (4, 3)" in wrong
        assert "leave this rank (2, 3)" in wrong


def made_of_new_memory() -> list[object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(numbered((5, 3)).float(), init_device_mesh("cpu", (2,)), [Shard(0)])
    local = torch.ones(local_of(tensor).shape, dtype=torch.bfloat16)
    made: Any = with_local(tensor, local)
    return [
        is_dtensor(made) and not is_dtensor(local),
        made.dtype is torch.bfloat16 and tensor.dtype is torch.float32,
        local_of(made) is local,
        made.placements == tensor.placements and tuple(made.shape) == (5, 3),
        bool((made.full_tensor() == 1).all()),
    ]


def test_a_dtensor_of_new_memory_is_divided_like_the_old_one(two_ranks: Ranks) -> None:
    assert two_ranks.run(made_of_new_memory) == [[True] * 5] * 2
