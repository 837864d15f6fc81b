"""Intervals of several dimensions, compared with numpy's indexing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sluice
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.targets import Targets
from sluice.reading import transfer
from sluice.records import Request
from sluice.sharding.regions import select_region
from support.plans import entry
from support.recorded_reads import record_reads

Region = tuple[tuple[tuple[int, int], ...], ...]


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


def read(path: Path, region: Region) -> torch.Tensor:
    with OpenCheckpoint.open(path) as checkpoint:
        entry = select_region(checkpoint.entries["w"], region)
        request = Request(name="w", entry=entry, dtype="float32", device="cpu")
        prepared = transfer.prepare(checkpoint, [request])
        return transfer.run(checkpoint, prepared, Targets(prepared.plan))[0][0]


@given(case=regions())
def test_any_region_is_what_numpy_selects(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], Region]
) -> None:
    shape, region = case
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    path = tmp_path_factory.mktemp("region") / "w.pt"
    torch.save({"w": whole}, path)
    assert torch.equal(read(path, region), torch.from_numpy(whole.numpy()[positions(region)]))


def test_only_the_bytes_of_the_region_are_read(tmp_path: Path) -> None:
    whole = torch.randn(4000, 1024)
    torch.save({"w": whole}, tmp_path / "w.pt")
    region: Region = (((0, 100), (2000, 2100)), ((0, 1024),))
    with sluice.open(tmp_path / "w.pt") as checkpoint:
        (recording,) = record_reads(checkpoint)
        entry = select_region(checkpoint.entries["w"], region)
        request = Request(name="w", entry=entry, dtype="float32", device="cpu")
        prepared = transfer.prepare(checkpoint, [request])
        ((tensor,), _) = transfer.run(checkpoint, prepared, Targets(prepared.plan))
    assert torch.equal(tensor, torch.cat([whole[:100], whole[2000:2100]]))
    assert prepared.plan.read_bytes == tensor.nbytes
    assert recording.read_bytes < tensor.nbytes + 100_000


@pytest.mark.parametrize(
    ("region", "problem"),
    [
        ((((0, 2),),), "1 lists of intervals"),
        ((((0, 3), (2, 4)), ((0, 6),)), "overlaps"),
        ((((0, 5),), ((0, 6),)), "leaves dimension 0"),
        ((((0, 4),), ((4, 2),)), "dimension 1"),
    ],
)
def test_intervals_that_cannot_be_selected(region: Region, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        select_region(entry((4, 6)), region)
