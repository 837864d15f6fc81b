"""Regions compared with tensors that torch divided, for every rank of every mesh, and with numpy's indexing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard, _StridedShard

import sluice
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.targets import Targets
from sluice.reading import transfer
from sluice.records import Request
from sluice.sharding.regions import Region, Sharding, Split, region_of, select_region, shape_of
from support.sources import record_reads

Placement = Shard | _StridedShard | None


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    """Shapes, meshes and placements in the order from left to right, without the exception of fully_shard."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(st.none(), dims.map(Shard), st.builds(lambda dim: _StridedShard(dim, split_factor=5), dims))
    return shape, mesh, tuple(draw(kinds) for _ in mesh)


def sharding(mesh: Sequence[int], coordinate: Sequence[int] | None, placements: Sequence[Placement]) -> Sharding:
    return Sharding(
        mesh=tuple(mesh),
        coordinate=None if coordinate is None else tuple(coordinate),
        placements=tuple(
            None if placement is None else Split(dim=placement.dim, pieces=int(getattr(placement, "split_factor", 1)))
            for placement in placements
        ),
    )


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(*shape)


def selected(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, intervals in enumerate(region):
        positions = [position for start, stop in intervals for position in range(start, stop)]
        tensor = tensor.index_select(dim, torch.tensor(positions, dtype=torch.int64))
    return tensor


def coordinates(mesh: Sequence[int]) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*map(range, mesh))


def chunk(tensor: torch.Tensor, ranks: int, rank: int, dim: int = 0) -> torch.Tensor:
    pieces = torch.chunk(tensor, ranks, dim)
    return pieces[rank] if rank < len(pieces) else tensor.narrow(dim, 0, 0)


@given(layouts())
def test_placements_from_left_to_right_divide_as_torch_divides(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = layout
    for coordinate in coordinates(mesh):
        expected = numbered(shape)
        for ranks, rank, placement in zip(mesh, coordinate, placements, strict=True):
            if placement is not None:
                expected = placement._split_tensor(expected, ranks, with_padding=False)[0][rank]
        region = region_of(shape, sharding(mesh, coordinate, placements))
        assert torch.equal(selected(numbered(shape), region), expected)
        assert shape_of(region) == tuple(expected.shape)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(2, 4), st.integers(0, 1))
def test_fully_shard_divides_what_tensor_parallelism_left(size: int, data: int, tensor: int, dim: int) -> None:
    """As FSDPParam does: it cuts the local tensor, of which the size may be uneven, and then describes it so."""
    shape = (size, 3) if dim == 0 else (3, size)
    placements = (_StridedShard(dim, split_factor=tensor), Shard(dim))
    for row, column in coordinates((data, tensor)):
        expected = chunk(chunk(numbered(shape), tensor, column, dim), data, row, dim)
        region = region_of(shape, sharding((data, tensor), (row, column), placements))
        assert torch.equal(selected(numbered(shape), region), expected)


def test_two_later_dimensions_come_before_a_strided_one() -> None:
    mesh, placements = (2, 2, 3), (_StridedShard(0, split_factor=6), Shard(0), Shard(0))
    for at in coordinates(mesh):
        expected = chunk(chunk(chunk(numbered((29,)), 2, at[1]), 3, at[2]), 2, at[0])
        assert torch.equal(selected(numbered((29,)), region_of((29,), sharding(mesh, at, placements))), expected)


def test_replicas_hold_everything_ranks_outside_nothing_and_no_dimension_is_invented() -> None:
    assert region_of((3, 2), sharding((2,), (1,), (None,))) == (((0, 3),), ((0, 2),))
    assert region_of((3, 2), sharding((2,), None, (None,))) == ((), ())
    assert region_of((), sharding((2,), (1,), (None,))) == ()
    with pytest.raises(ValueError, match="does not divide a tensor of 1 dimensions"):
        region_of((4,), sharding((2,), (0,), (Shard(1),)))


@st.composite
def intervals(draw: st.DrawFn, size: int) -> tuple[tuple[int, int], ...]:
    pairs = draw(st.integers(1, 3))
    edges = sorted(draw(st.lists(st.integers(0, size), min_size=2 * pairs, max_size=2 * pairs)))
    return tuple((edges[i], edges[i + 1]) for i in range(0, len(edges), 2))


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    return shape, tuple(draw(intervals(size)) for size in shape)


def positions(region: Region) -> tuple[np.ndarray, ...]:
    return np.ix_(*(np.concatenate([np.arange(*each) for each in dim]).astype(int) for dim in region))


def read(checkpoint: OpenCheckpoint, region: Region) -> torch.Tensor:
    entry = select_region(checkpoint.entries["w"], region)
    prepared = transfer.prepare(checkpoint, [Request(name="w", entry=entry, dtype="float32", device="cpu")])
    ((tensor,), _) = transfer.run(checkpoint, prepared, Targets(prepared.plan))
    return tensor


@given(case=regions())
def test_any_region_is_what_numpy_selects(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], Region]
) -> None:
    shape, region = case
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    path = tmp_path_factory.mktemp("region") / "w.pt"
    torch.save({"w": whole}, path)
    with OpenCheckpoint.open(path) as checkpoint:
        assert torch.equal(read(checkpoint, region), torch.from_numpy(whole.numpy()[positions(region)]))


def test_only_the_bytes_of_the_region_are_read(tmp_path: Path) -> None:
    whole = torch.randn(4000, 1024)
    torch.save({"w": whole}, tmp_path / "w.pt")
    region: Region = (((0, 100), (2000, 2100)), ((0, 1024),))
    with sluice.open(tmp_path / "w.pt") as checkpoint:
        (recording,) = record_reads(checkpoint)
        tensor = read(checkpoint, region)
    assert torch.equal(tensor, torch.cat([whole[:100], whole[2000:2100]]))
    assert recording.read_bytes < tensor.nbytes + 100_000
