"""Which tensors the ranks hold together, and which rank writes which part of each. Nothing is exchanged here.

Every rank describes what it holds (``HeldTensor``). All ranks get all descriptions and compute the same tensors, ties
and writers from them, so that no rank has to tell another what to write.

The regions of a tensor that ranks hold are equal or have no element in common, and together have every element once.
Ranks that hold the same region write such regions by turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import TypeAlias

import torch
from msgspec import Struct

from sluice._errors import SaveError
from sluice.entries.slicing import cut_dimensions, first_miscount
from sluice.sharding.dtensors import UndescribedError, is_dtensor, local_of, region_held
from sluice.sharding.regions import Region
from sluice.writing.contents import stored_once
from sluice.writing.held_object import finished_dtype, identity, refuse_unsupported

__all__ = ["Box", "DividedTensor", "HeldTensor", "agreed_ties", "boxes", "divide", "dtensors_in", "held_tensors"]

#: First index and size of a box, in each dimension.
Box: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"

#: Most corners of the boxes of one tensor that are compared: a tensor that 1,000 ranks cut in two dimensions has 4,000.
_MOST_CORNERS = 1 << 22


class HeldTensor(Struct, frozen=True, kw_only=True, array_like=True):
    """A tensor as one rank holds it."""

    #: Dtype in the file.
    dtype: str
    #: Shape of the whole tensor.
    shape: tuple[int, ...]
    #: Region that the rank holds.
    region: Region
    #: First name in alphabetical order of the tensors in the same memory; None if the rank holds no element.
    tied_to: str | None


class DividedTensor(Struct, frozen=True, kw_only=True):
    """A tensor that ranks hold together."""

    #: Dtype in the file.
    dtype: str
    #: Shape of the whole tensor.
    shape: tuple[int, ...]
    #: The rank that writes each part: regions that are not empty, in the order of their first element. Together they
    #: have each element once.
    parts: Mapping[Region, int]

    def of(self, rank: int) -> Region | None:
        """Return the part that a rank writes, or None: the parts that a rank holds are one."""
        return next((region for region, writer in self.parts.items() if writer == rank), None)


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
        SaveError: A tensor cannot be saved.
    """
    regions = {name: _held_region(tensor, name) for name, tensor in tensors.items()}
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


def _held_region(tensor: torch.Tensor, name: str) -> Region:
    """Return what this rank holds of a tensor: all of a plain one, nothing outside of the mesh of a DTensor.

    Raises:
        SaveError: The tensor cannot be saved.
    """
    refuse_unsupported(local_of(tensor), name)
    if not is_dtensor(tensor):
        return tuple(((0, size),) if size else () for size in tensor.shape)
    try:
        return region_held(tensor)
    except UndescribedError as error:
        raise SaveError(f"the tensor is {error}", tensor=name) from error


def _identity(tensor: torch.Tensor) -> Hashable | None:
    """Return equal keys for tensors with the same elements in the same memory; None if the memory does not tell."""
    placements = tuple(tensor.placements) if is_dtensor(tensor) else ()  # type: ignore[attr-defined]
    local = identity(local_of(tensor))
    return None if local is None else (*local, tuple(tensor.shape), placements)


def divide(ranks: Sequence[Mapping[str, HeldTensor]]) -> dict[str, DividedTensor]:
    """Return the tensors that all ranks hold together, and who writes them.

    Args:
        ranks: What each rank holds. Ranks may hold different tensors.

    Raises:
        SaveError: Ranks contradict each other, or no rank holds some element.
    """
    tensors = {}
    shared = 0
    for name, held in _by_name(ranks).items():
        any_rank, parts = next(iter(held.values())), {}
        for region, owners in _holders(name, held).items():
            parts[region] = owners[shared % len(owners)]
            shared += len(owners) > 1
        tensors[name] = DividedTensor(dtype=any_rank.dtype, shape=any_rank.shape, parts=parts)
    return tensors


def agreed_ties(ranks: Sequence[Mapping[str, HeldTensor]]) -> dict[str, str]:
    """Return the names that are not stored, because every rank has their tensor in the memory of a different name.

    Returns:
        ``{name: stored name}``. A rank without elements of a tensor cannot tell, and follows the others.
    """
    opinions: defaultdict[str, set[str]] = defaultdict(set)
    for tensors in ranks:
        for name, tensor in tensors.items():
            if tensor.tied_to is not None:
                opinions[name].add(tensor.tied_to)
    return {name: stored for name, found in opinions.items() if len(found) == 1 for stored in found if stored != name}


def boxes(region: Region) -> list[Box]:
    """Return the boxes of a region, in the order of their first elements."""
    return [
        (tuple(start for start, _ in each), tuple(stop - start for start, stop in each)) for each in product(*region)
    ]


def _by_name(ranks: Sequence[Mapping[str, HeldTensor]]) -> dict[str, dict[int, HeldTensor]]:
    """Return what each rank holds of each tensor, after a comparison of shapes and dtypes."""
    held: dict[str, dict[int, HeldTensor]] = {}
    for rank, tensors in enumerate(ranks):
        for name, tensor in tensors.items():
            others = held.setdefault(name, {})
            for other, first in others.items():
                if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                    raise SaveError(
                        f"ranks {other} and {rank} hold different tensors under one name",
                        tensor=name,
                        expected=f"{first.dtype} {list(first.shape)}",
                        found=f"{tensor.dtype} {list(tensor.shape)}",
                    )
                break
            others[rank] = tensor
    return held


def _holders(name: str, held: Mapping[int, HeldTensor]) -> dict[Region, list[int]]:
    """Return the ranks that hold each part of a tensor; the parts are in the order of their first element."""
    holders: defaultdict[Region, list[int]] = defaultdict(list)
    for rank, tensor in held.items():
        if all(tensor.region):
            holders[tensor.region].append(rank)
    ordered = sorted(holders)
    shape = next(iter(held.values())).shape
    problem = _miscount(shape, tuple(ordered))
    if problem:
        raise SaveError(problem, tensor=name, expected="every element on one rank, or on ranks that hold the same part")
    return {region: holders[region] for region in ordered}


@lru_cache(maxsize=1024)
def _miscount(shape: tuple[int, ...], regions: tuple[Region, ...]) -> str:
    """Return what is wrong with the parts of a tensor: layers of a model have the same ones."""
    if 0 in shape:
        return ""
    if not regions:
        return "no rank holds any element"
    found = [box for region in regions for box in boxes(region)]
    if len(found) << len(cut_dimensions(shape, found)) > _MOST_CORNERS:
        return "the ranks hold too many pieces"
    miscount = first_miscount(shape, found)
    if miscount is None:
        return ""
    element, count = miscount
    if count:
        return f"element {list(element)} is in {count} different parts of ranks"
    return f"no rank holds element {list(element)}"
