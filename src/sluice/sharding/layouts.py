"""How the parameters of a model are divided over a mesh of named dimensions, by fully_shard and tensor parallelism.

The name of a mesh dimension says what it does, as in the documentation of torch, torchtitan and transformers:

- ``dp``, ``fsdp``, ``dp_shard``, ``shard``: ``fully_shard`` divides dimension 0 of every parameter, after tensor
  parallelism;
- ``ddp``, ``dp_replicate``, ``replicate``: every rank along it holds the same;
- ``tp``: tensor parallelism divides the parameters of some modules, each in a style. ``"colwise"`` divides the output
  features of a linear layer: dimension 0 of its weight and its bias. ``"rowwise"`` divides its input features:
  dimension 1 of its weight. Of the table of an embedding, ``"colwise"`` divides dimension 1 and ``"rowwise"``
  dimension 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

from msgspec import Struct

from sluice.sharding.regions import Sharding, Split

__all__ = ["REPLICATING", "SHARDING", "STYLES", "TENSOR_PARALLEL", "Mesh", "divided_dim", "mesh_of", "sharding_on"]

#: Names of mesh dimensions, by what they do.
SHARDING = ("dp", "fsdp", "dp_shard", "shard")
REPLICATING = ("ddp", "dp_replicate", "replicate")
TENSOR_PARALLEL = "tp"

#: Largest mesh. Each part of the parameters is planned in milliseconds, each copy of it in microseconds.
_MOST_PARTS, _MOST_RANKS = 1 << 14, 1 << 20

#: Dimension that a style divides, for the weight of a linear layer, its bias and the table of an embedding. The longer
#: names are those of transformers; they differ in how activations are passed on.
STYLES: Mapping[str, Mapping[str, int | None]] = {
    **{style: {"weight": 0, "bias": 0, "table": 1} for style in ("colwise", "colwise_rep", "colwise_gather_output")},
    **{style: {"weight": 1, "table": 0} for style in ("rowwise", "rowwise_rep", "rowwise_split_input")},
    "embedding_colwise": {"table": 1},
    "embedding_rowwise": {"table": 0},
    **{style: {} for style in ("replicate", "all_reduce", "replicated_with_grad_allreduce", "sequence_parallel")},
}


class Mesh(Struct, frozen=True, kw_only=True):
    """A mesh of ranks; rank 0 is at its first coordinate, and the last dimension changes fastest."""

    #: Name of each dimension.
    names: tuple[str, ...]
    #: Ranks along each dimension.
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Yield the coordinate of each rank, in the order of ranks."""
        return product(*map(range, self.sizes))

    def part(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first coordinate whose rank holds the same, a copy of it."""
        return tuple(0 if name in REPLICATING else at for name, at in zip(self.names, coordinate, strict=True))


def mesh_of(sizes: Mapping[str, int]) -> Mesh:
    """Return a checked mesh.

    Raises:
        ValueError: A name has no meaning, two dimensions shard parameters, or a size is not positive or too large.
    """
    known = (*SHARDING, *REPLICATING, TENSOR_PARALLEL)
    if not sizes:
        raise ValueError("a mesh needs at least one dimension, such as dp=8")
    for name, size in sizes.items():
        if name not in known:
            raise ValueError(f"mesh dimension {name!r} has no known meaning; use one of {', '.join(known)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh dimension {name!r} must have a positive number of ranks, not {size!r}")
    several = [name for name in sizes if name in SHARDING]
    if len(several) > 1:
        raise ValueError(f"{' and '.join(several)} both shard every parameter: give their product as one dimension")
    mesh = Mesh(names=tuple(sizes), sizes=tuple(sizes.values()))
    parts = prod(size for name, size in sizes.items() if name not in REPLICATING)
    if parts > _MOST_PARTS or mesh.ranks > _MOST_RANKS:
        raise ValueError(f"a mesh of {mesh.ranks:,} ranks, {parts:,} parts; at most {_MOST_RANKS:,}, {_MOST_PARTS:,}")
    return mesh


def divided_dim(style: str, part: str) -> int | None:
    """Return the dimension that a style of tensor parallelism divides; None if it divides none.

    Args:
        style: One of ``STYLES``.
        part: ``"weight"`` or ``"bias"`` of a linear layer, or ``"table"`` of an embedding; others are not divided.

    Raises:
        ValueError: The style is not known.
    """
    if style not in tuple(STYLES):  # a list has no hash
        raise ValueError(f"tensor-parallel style {style!r} is not known here; known are {', '.join(STYLES)}")
    return STYLES[style].get(part)


def sharding_on(mesh: Mesh, coordinate: tuple[int, ...], *, dimensions: int, tp_dim: int | None = None) -> Sharding:
    """Return how a parameter is divided, seen from one rank.

    Args:
        mesh: The mesh.
        coordinate: Position of the rank in it.
        dimensions: Dimensions of the parameter.
        tp_dim: Dimension that tensor parallelism divides; None if it does not divide this parameter.

    Raises:
        ValueError: The parameter is a scalar, which ``fully_shard`` refuses.
    """
    placements: list[Split | None] = []
    for axis, name in enumerate(mesh.names):
        if name in REPLICATING:
            placements.append(None)
        elif name == TENSOR_PARALLEL:
            placements.append(None if tp_dim is None else Split(dim=tp_dim))
        elif not dimensions:
            raise ValueError("fully_shard refuses scalar parameters: give it one dimension of one element")
        else:
            later = mesh.sizes[axis + 1 :] if tp_dim == 0 else ()
            tensor_parallel = [
                size for size, other in zip(later, mesh.names[axis + 1 :], strict=False) if other == TENSOR_PARALLEL
            ]
            placements.append(Split(dim=0, pieces=prod(tensor_parallel)))
    return Sharding(mesh=mesh.sizes, coordinate=coordinate, placements=tuple(placements))
