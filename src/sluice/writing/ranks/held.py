"""Describe the tensors of a state dict as this rank holds them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from sluice._errors import SaveError
from sluice.sharding.dtensors import UndescribedError, is_dtensor, local_of, region_held, sharding_of
from sluice.sharding.regions import Region
from sluice.writing.contents import stored_once
from sluice.writing.held_object import identity
from sluice.writing.items import finished_dtype, refuse_unsupported
from sluice.writing.ranks.division import HeldTensor

__all__ = ["dtensors_in", "held_region", "held_tensors"]


def dtensors_in(state: object) -> list[torch.Tensor]:
    """Return the DTensors in the containers of an object."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = [state]
    while waiting:
        value = waiting.pop()
        if is_dtensor(value):
            found.append(value)  # type: ignore[arg-type]
        elif isinstance(value, (Mapping, list, tuple, set)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, Mapping) else value
    return found


def held_tensors(tensors: Mapping[str, torch.Tensor], dtype: str | None) -> dict[str, HeldTensor]:
    """Return the description of each tensor.

    Args:
        tensors: DTensors, and plain tensors of which every rank holds a copy.
        dtype: Dtype that real floating-point tensors are cast to; None keeps each dtype.

    Raises:
        SaveError: A tensor cannot be saved, or this rank is not part of its mesh.
    """
    regions = {name: held_region(tensor, name) for name, tensor in tensors.items()}
    _, aliases = stored_once(tensors, _identity)
    return {
        name: HeldTensor(
            dtype=finished_dtype(tensor, dtype),
            shape=tuple(tensor.shape),
            region=regions[name],
            tied_to=aliases.get(name, name) if all(regions[name]) else None,
        )
        for name, tensor in tensors.items()
    }


def held_region(tensor: torch.Tensor, name: str) -> Region:
    """Return what this rank holds of a tensor: all of a plain one.

    Raises:
        SaveError: The tensor cannot be saved, or this rank is not part of its mesh.
    """
    refuse_unsupported(local_of(tensor), name)
    if not is_dtensor(tensor):
        return tuple(((0, size),) if size else () for size in tensor.shape)
    try:
        if sharding_of(tensor).coordinate is None:
            raise SaveError(
                "this rank is not part of the mesh of the tensor",
                tensor=name,
                advice="Nothing was written. Call save on the ranks of the mesh only.",
            )
        return region_held(tensor)
    except UndescribedError as error:
        raise SaveError(f"the tensor is {error}", tensor=name) from error


def _identity(tensor: torch.Tensor) -> Hashable | None:
    """Return equal keys for tensors with the same elements in the same memory; None if the memory does not tell."""
    placements = tuple(tensor.placements) if is_dtensor(tensor) else ()  # type: ignore[attr-defined]
    local = identity(local_of(tensor))
    return None if local is None else (*local, tuple(tensor.shape), placements)
