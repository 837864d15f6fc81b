"""Models that ``sluice load --mesh`` divides over the ranks that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import torch
import torch.distributed as dist
from torch import nn

from sluice.loading.rank_plans import tensor_parallel_dims
from sluice.sharding.layouts import REPLICATING, SHARDING, TENSOR_PARALLEL, mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["divide", "process_group"]

_LAUNCH = "--mesh divides the model over ranks: run torchrun --nproc-per-node {ranks} -m sluice load ... --mesh ..."


@contextmanager
def process_group(mesh: Mapping[str, int]) -> Iterator[int]:
    """Join the process group of the launcher, unless the process has one; yield the rank.

    Args:
        mesh: Ranks along each dimension.

    Raises:
        click.UsageError: There is no launcher, or it started a different number of ranks.
        ValueError: A name of the mesh has no meaning.
    """
    ranks = mesh_of(mesh).ranks
    own = not dist.is_initialized()
    if own and "RANK" not in os.environ:
        raise click.UsageError(_LAUNCH.format(ranks=ranks))
    if own:
        device = torch.accelerator.current_accelerator()
        if device is not None:
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(dist.get_default_backend_for_device(device or "cpu"))
    try:
        if dist.get_world_size() != ranks:
            raise click.UsageError(f"the mesh has {ranks} ranks, and the launcher started {dist.get_world_size()}")
        yield dist.get_rank()
    finally:
        if own:
            dist.destroy_process_group()


def divide(model: nn.Module, mesh: Mapping[str, int], styles: Mapping[str, str] | None) -> nn.Module:
    """Divide the parameters of a model on meta as ``sluice plan --mesh`` describes; return it.

    Args:
        model: The model.
        mesh: Ranks along each dimension; see ``sharding.layouts``.
        styles: Style of tensor parallelism by pattern of module names; None for the model's ``tp_plan``.

    Raises:
        click.UsageError: The mesh has a dimension ``tp``, and there are no styles.
        ValueError: A style is not known.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    ranks = init_device_mesh(device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    if TENSOR_PARALLEL in mesh:
        plan = styles or getattr(model, "tp_plan", None)
        if not plan:
            advice = """--tp-plan '{"layers.*.mlp.up_proj": "colwise"}'"""
            raise click.UsageError(f"mesh dimension 'tp' needs {advice}")
        _parallelize(model, ranks[TENSOR_PARALLEL], plan)
    shard = next((name for name in mesh if name in SHARDING), None)
    if shard is not None:
        replicate = next((name for name in mesh if name in REPLICATING), None)
        fully_shard(model, mesh=ranks[shard] if replicate is None else ranks[replicate, shard])
    return model


def _parallelize(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, ColwiseParallel | RowwiseParallel] = {}
    dims = tensor_parallel_dims(model, plan)
    for path, module in model.named_modules():
        dim = dims.get(f"{path}.weight" if path else "weight")
        if dim is not None:
            columns = dim == (1 if isinstance(module, nn.Embedding) else 0)
            styles[path] = ColwiseParallel() if columns else RowwiseParallel()
    parallelize_module(model, mesh, dict(styles))
