"""Which ranks hold a model: those of the device meshes of its DTensors.

A plain model is none of this: without DTensors or without a process group nothing of torch.distributed is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch

from sluice.ranks.protocol import Group
from sluice.sharding.dtensors import is_dtensor

__all__ = ["group_of", "local_rank_count", "meshes_of"]

#: Variables in which torchrun, Open MPI and Slurm give the number of processes that they started on this host.
_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def group_of(tensors: Iterable[torch.Tensor]) -> Group | None:
    """Return the group of the ranks that hold a model; None if it is this rank alone, or if this rank holds none of it.

    Args:
        tensors: Parameters and buffers of the model, or state of an optimizer.
    """
    found: list[Any] = [tensor for tensor in tensors if is_dtensor(tensor)]
    if not found:
        return None
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in found}
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    ranks = {int(rank) for mesh in meshes.values() for rank in _whole(mesh).mesh.flatten().tolist()}
    own = dist.get_rank()
    if own not in ranks or len(ranks) == 1:
        return None
    from sluice.ranks.store_group import StoreGroup

    return StoreGroup(_default_store(), own, ranks)


def meshes_of(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each mesh over which tensors are divided."""
    meshes = {id(mesh): mesh for tensor in tensors if is_dtensor(tensor) for mesh in [tensor.device_mesh]}  # type: ignore[attr-defined]
    return tuple(sorted({tuple(sorted(map(int, mesh.mesh.flatten().tolist()))) for mesh in meshes.values()}))


def local_rank_count() -> int:
    """Return how many ranks of the default process group are on this host; 1 without a group.

    If no launcher says it, all of them: too little staging is slow, too much does not fit.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 1
    ranks: int = dist.get_world_size()
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return min(int(value), ranks)
    return ranks


def _whole(mesh: Any) -> Any:
    """Return the mesh from which a mesh was sliced: ranks of different slices hold parts of one model."""
    root = getattr(mesh, "_get_root_mesh", None)
    if root is not None:
        return root() or mesh
    from torch.distributed import device_mesh

    resources = getattr(device_mesh, "_mesh_resources", None)  # up to torch 2.8
    return resources.get_root_mesh(mesh) if resources is not None else mesh


def _default_store() -> Any:
    """Return the store of the default process group."""
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    if hasattr(world, "get_group_store"):
        return world.get_group_store()
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001  the only way in earlier versions
