"""Which ranks hold a model: those of the device meshes of its DTensors.

A plain model is none of this: without DTensors or without a process group nothing of torch.distributed is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sluice.dtensors.description import is_dtensor
from sluice.ranks.protocol import Group

__all__ = ["group_of", "meshes_of"]


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
