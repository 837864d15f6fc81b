"""Divisions by name as fully_shard and parallelize_module divide a model, and DTensors that cannot be described."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sluice.sharding.dtensors import UndescribedError, is_dtensor, local_of, region_held, with_local
from sluice.sharding.layouts import divided_dim, mesh_of, sharding_on
from sluice.sharding.regions import Region, region_of
from support.divided_models import divide_by_names
from support.ranks import Ranks

# The functions that run on ranks import torch.distributed.tensor, which takes as long as all of torch.
# mypy: disable-error-code="no-untyped-call"


def parallel_model(names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, tuple[torch.Size, Region]]:
    """Divide a model; return shape and region of each parameter on this rank."""
    with torch.device("meta"):
        layers = {
            "table": nn.Embedding(20, 6),
            "up": nn.Linear(6, 10),
            "down": nn.Linear(10, 6),
            "norm": nn.LayerNorm(6),
        }
        model = nn.Sequential(OrderedDict(layers))
    divide_by_names(model, names, sizes)
    return {
        name: (parameter.shape, region_held(parameter))
        for name, parameter in model.named_parameters()
        if isinstance(parameter, dist.tensor.DTensor)
    }


@pytest.mark.parametrize(
    ("names", "sizes"), [(("dp",), (4,)), (("tp",), (4,)), (("dp", "tp"), (2, 2)), (("dp_replicate", "dp"), (2, 2))]
)
def test_divisions_by_name_are_those_of_torch(
    four_ranks: Ranks, names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    parts = {"table.weight": "table", "up.weight": "weight", "up.bias": "bias", "down.weight": "weight"}
    styles = {"table": "rowwise", "up": "colwise", "down": "rowwise"}
    mesh = mesh_of(dict(zip(names, sizes, strict=True)))
    found = four_ranks.run(parallel_model, names, sizes)
    for coordinate, regions in zip(mesh.coordinates(), found, strict=True):
        assert len(regions) >= 4
        for name, (shape, region) in regions.items():
            style = styles.get(name.partition(".")[0])
            tp_dim = divided_dim(style, parts.get(name, "")) if style and "tp" in names else None
            sharding = sharding_on(mesh, coordinate, dimensions=len(shape), tp_dim=tp_dim)
            assert region_of(shape, sharding) == region, name


def test_a_sharded_scalar_is_refused() -> None:
    with pytest.raises(ValueError, match="scalar"):
        sharding_on(mesh_of({"dp": 2}), (0,), dimensions=0)


def refusals() -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import Placement

    class Odd(Placement):
        pass

    mesh, local = init_device_mesh("cpu", (2,)), torch.zeros(2, 3)
    wrong: Any = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((4, 3)), stride=(3, 1))
    wrong._local_tensor = torch.zeros(4, 3)
    odd: Any = DTensor.from_local(local, mesh, [Shard(0)])
    odd._spec.placements = (Odd(),)
    region_held(distribute_tensor(local, DeviceMesh("cpu", [0]), [Shard(0)]))  # the second rank holds none of it
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
