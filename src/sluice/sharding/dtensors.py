"""Describe a DTensor as this rank sees it, and make one from a new local tensor.

A DTensor has the shape of the whole tensor; the memory of this rank is its local tensor. ``torch.distributed.tensor``
is never imported here: a process that has a DTensor has imported it, and a load without one must not take the time.

After a load, the ``load_state_dict`` post-hook of ``fully_shard`` (FSDP2) copies a new local tensor into memory padded
to the size of the first rank's, and into page-locked memory if parameters are offloaded to the CPU. No public function
tells which; where torch does not have the private names any more, this memory is not in the prediction.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.torch_version import TorchVersion

from sluice.sharding.regions import Region, Sharding, Split, region_of, shape_of

__all__ = [
    "ShardMemory",
    "UndescribedError",
    "home",
    "is_dtensor",
    "local_of",
    "region_held",
    "reshard",
    "shard_memories",
    "sharding_of",
    "with_local",
]

# DTensor has no public access to its local tensor that autograd does not record, nor to its description.
# ruff: noqa: SLF001

_MODULE = "torch.distributed.tensor"

#: In torch 2.6 fully_shard keeps other memory than the local tensor for columns of live parameters.
_OLDEST_TORCH = "2.8"


class UndescribedError(ValueError):
    """The part of a DTensor that this rank holds is not known. The text completes "the tensor is ..."."""


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor; False for subclasses of it, whose local tensors mean something else."""
    module = sys.modules.get(_MODULE)
    return module is not None and type(value) is module.DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank: the local tensor of a DTensor, any other tensor itself."""
    local: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local


def sharding_of(tensor: torch.Tensor) -> Sharding:
    """Return how a DTensor is divided, seen from this rank.

    Raises:
        UndescribedError: A placement leaves the ranks with something other than elements of the tensor, or is unknown.
    """
    dtensor: Any = tensor
    for entry in getattr(dtensor._spec, "shard_order", None) or ():
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            raise UndescribedError(f"a DTensor whose mesh dimensions divide it in the order {entry.mesh_dims}")
    coordinate = dtensor.device_mesh.get_coordinate()
    return Sharding(
        mesh=tuple(dtensor.device_mesh.shape),
        coordinate=None if coordinate is None else tuple(coordinate),
        placements=tuple(_split(placement, tensor.ndim) for placement in dtensor.placements),
    )


def region_held(tensor: torch.Tensor) -> Region:
    """Return the region of a DTensor that this rank holds, after a comparison with the shape of the local tensor.

    Raises:
        UndescribedError: A placement is not known, or the local tensor has another shape than the placements say.
    """
    if TorchVersion(torch.__version__) < _OLDEST_TORCH:
        raise UndescribedError(
            f"a DTensor of torch {torch.__version__}: sluice needs torch {_OLDEST_TORCH} or newer for models that are "
            "divided over ranks"
        )
    sharding = sharding_of(tensor)
    try:
        region = region_of(tensor.shape, sharding)
    except ValueError as error:
        raise UndescribedError(f"a DTensor that torch describes wrongly: {error}") from error
    expected, local = shape_of(region), local_of(tensor)
    # torch gives ranks outside of the mesh a local tensor of shape (0,) for a tensor of any shape.
    if tuple(local.shape) != expected and (local.numel() or 0 not in expected):
        raise UndescribedError(
            f"a DTensor with a local tensor of shape {tuple(local.shape)}, where its placements "
            f"{tuple(tensor.placements)} leave this rank {expected}"  # type: ignore[attr-defined]
        )
    return region


def home(tensor: torch.Tensor) -> str:
    """Return the device, as torch writes it, on which the mesh of a DTensor expects the memory of this rank."""
    kind: str = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    if kind == "cpu":
        return kind
    return str(torch.device(kind, torch.get_device_module(kind).current_device()))


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor that is divided like another one and has a new local tensor, which it shares memory with."""
    # Not DTensor.from_local: it moves the local tensor to the device of the mesh, and undoes an offload to the CPU.
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    if spec.tensor_meta.dtype != local.dtype:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    kind: Any = type(tensor)
    made: torch.Tensor = kind(local, spec, requires_grad=False)
    return made


def _split(placement: Any, dimensions: int) -> Split | None:
    """Return a placement as a record; None if the ranks along its mesh dimension hold the same elements."""
    kind, module = type(placement), sys.modules[_MODULE]
    if kind is module.Replicate:
        return None
    if kind is module.Shard:
        return Split(dim=placement.dim % max(dimensions, 1))
    if kind.__name__ == "_StridedShard" and kind.__module__.startswith(f"{_MODULE}."):
        return Split(dim=placement.dim % max(dimensions, 1), pieces=placement.split_factor)
    if isinstance(placement, module.Partial):
        raise UndescribedError(
            f"a DTensor with the placement {placement!r}: its ranks hold summands, not elements; redistribute it to "
            "Shard or Replicate before the load"
        )
    raise UndescribedError(f"a DTensor with the placement {placement!r}, which sluice does not know")


class ShardMemory(Struct, frozen=True, kw_only=True):
    """The memory in which fully_shard keeps a local tensor."""

    #: Its elements, with padding.
    elements: int
    #: Whether it is in host memory, also if the mesh is of accelerators.
    offloaded: bool
    #: Whether it is page-locked.
    pinned: bool


def reshard(module: nn.Module) -> list[Any]:
    """Return the parts that fully_shard divided; free parameters gathered for a forward pass: a load would be lost."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not torch.distributed.is_initialized():  # nothing is looked at in the usual case
        return []
    for part in module.modules():
        # Not FSDPModule.reshard: that leaves what a parent divided, and what a forward pass that failed has gathered.
        for hook in vars(part).get("_state_dict_pre_hooks", {}).values():
            if getattr(hook, "__qualname__", "").startswith("FSDPParamGroup."):
                hook()
    return [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def shard_memories(parts: Iterable[Any]) -> Mapping[int, ShardMemory]:
    """Return the memory of each parameter of the parts that ``reshard`` returns, by the id of the parameter."""
    return {
        id(parameter.sharded_param): ShardMemory(
            elements=prod(parameter.padded_sharded_param_size),
            offloaded=bool(getattr(parameter, "offload_to_cpu", False)),
            pinned=bool(getattr(parameter, "pin_memory", False)),
        )
        for part in parts
        for parameter in _parameters(part)
        if hasattr(parameter, "sharded_param") and hasattr(parameter, "padded_sharded_param_size")
    }


def _parameters(part: Any) -> Iterator[Any]:
    state = part._get_fsdp_state()
    one = getattr(state, "_fsdp_param_group", None)  # up to torch 2.12
    for group in getattr(state, "_fsdp_param_groups", [one] if one is not None else []):
        yield from group.fsdp_params
