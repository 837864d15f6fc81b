"""Divisions by name, compared with what fully_shard and parallelize_module do to a model."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sluice.sharding.dtensors import region_held
from sluice.sharding.layouts import divided_dim, mesh_of, sharding_on
from sluice.sharding.regions import Region, region_of
from support.ranks import Ranks


def parallel_model(names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, tuple[torch.Size, Region]]:
    """Divide a model as torch's documentation has it; return shape and region of each parameter on this rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with torch.device("meta"):
        layers = {
            "table": nn.Embedding(20, 6),
            "up": nn.Linear(6, 10),
            "down": nn.Linear(10, 6),
            "norm": nn.LayerNorm(6),
        }
        model = nn.Sequential(OrderedDict(layers))
    if "tp" in names:
        styles = {"table": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], styles)
    if "dp" in names:
        fully_shard(model, mesh=mesh["dp"] if "tp" in names else mesh)
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


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "at least one dimension"),
        ({"pp": 2}, "'pp' has no known meaning; use one of dp"),
        ({"dp": 0}, "positive number of ranks, not 0"),
        ({"dp": True}, "positive number of ranks"),
        ({"dp": 2, "fsdp": 2}, "dp and fsdp both shard"),
    ],
)
def test_meshes_without_a_meaning_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_of(sizes)


def test_an_unknown_style_and_a_sharded_scalar_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'packed_colwise' is not known here; known are colwise"):
        divided_dim("packed_colwise", "weight")
    with pytest.raises(ValueError, match="scalar"):
        sharding_on(mesh_of({"dp": 2}), (0,), dimensions=0)
