"""DTensors that cannot be described, and those of new memory; loads and saves compare the others with torch."""

from __future__ import annotations

from typing import Any

import torch

from sluice.sharding.dtensors import UndescribedError, is_dtensor, local_of, region_held, with_local
from support.ranks import Ranks

# The functions that run on ranks import torch.distributed.tensor, which takes as long as all of torch.
# mypy: disable-error-code="no-untyped-call"


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

    tensor = distribute_tensor(torch.arange(15.0).reshape(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
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
