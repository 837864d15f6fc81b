"""Requests through planner and engine, compared with torch's view of the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice._dtypes import dtype_name, torch_dtype
from sluice.engine.targets import Targets
from support.dtypes import TORCH_DTYPES
from support.oracles import bits
from support.plans import MIB, Stored, entry_of, execute, load, request

DTYPES = [torch_dtype(name) for name in TORCH_DTYPES]


def random_storage(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(tmp_path: Path, dtype: torch.dtype, shift: int, cached: bool) -> None:
    storage = random_storage(1600)
    tensor = storage.view(dtype)
    [loaded] = load(tmp_path / "f", [storage], [request("t", entry_of(tensor, 0))], shift=shift, cached=cached)
    assert loaded.dtype == dtype
    assert bits(loaded.view(torch.uint8)) == bits(storage)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_casts_equal_to(tmp_path: Path, to: torch.dtype, cached: bool) -> None:
    tensor = torch.randn(700_000)
    wanted = request("t", entry_of(tensor, 0), dtype=dtype_name(to))
    [loaded] = load(tmp_path / "f", [tensor], [wanted], cached=cached)
    assert torch.equal(loaded, tensor.to(to))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("offset", [0, 64, 4096, 5000])
def test_large_tensors_arrive_without_staging(tmp_path: Path, offset: int, cached: bool) -> None:
    tensor = torch.randn(3 * MIB + 17)
    [loaded] = load(tmp_path / "f", [tensor], [request("t", entry_of(tensor, 0))], shift=offset, cached=cached)
    assert torch.equal(loaded, tensor)
    assert loaded.untyped_storage().nbytes() == tensor.nbytes


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """Draw a view of ``base``: any shape and strides within bounds, in one of a few dtypes."""
    typed = base.view(draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64])))
    rank = draw(st.integers(0, 4))
    shape, stride, room = [], [], typed.numel() - 1
    for _ in range(rank):
        step = draw(st.integers(0, 40))
        most = room // step if step else 5
        size = draw(st.integers(0, min(most + 1, 9)))
        room -= max(size - 1, 0) * step
        shape.append(size)
        stride.append(step)
    start = draw(st.integers(0, max(room, 0)))
    return typed.as_strided(shape, stride, start)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data(), share=st.booleans(), cached=st.booleans(), shift=st.sampled_from([0, 2, 5]))
def test_views_equal_torchs(tmp_path: Path, data: st.DataObject, share: bool, cached: bool, shift: int) -> None:
    bases = [random_storage(2048, seed) for seed in range(2)]
    picked = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
    tensors = [data.draw(views(bases[number])) for number in picked]
    requests = [
        request(f"t{i}", entry_of(tensor, number))
        for i, (number, tensor) in enumerate(zip(picked, tensors, strict=True))
    ]
    found = load(tmp_path / "f", bases, requests, shift=shift, share=share, cached=cached)
    assert all(map(same_bits, found, tensors))


@pytest.mark.parametrize("cached", [True, False])
def test_live_tensors_of_any_strides_are_filled_in_place(tmp_path: Path, cached: bool) -> None:
    plain, permuted = torch.randn(600, 500), torch.randn(600, 500)
    live = [torch.zeros(600, 500), torch.zeros(500, 600).t()]
    addresses = [tensor.data_ptr() for tensor in live]
    requests = [
        request(name, entry_of(tensor, i), stride=live[i].stride(), existing=True)
        for i, (name, tensor) in enumerate({"a": plain, "b": permuted}.items())
    ]
    load(tmp_path / "f", [plain, permuted], requests, cached=cached, existing=dict(enumerate(live)))
    assert torch.equal(live[0], plain)
    assert torch.equal(live[1], permuted)
    assert [tensor.data_ptr() for tensor in live] == addresses


def test_progress_and_completion_reach_the_caller(tmp_path: Path) -> None:
    tensors = [torch.randn(MIB), torch.randn(100), torch.randn(50)]
    done: list[int] = []
    completed: list[int] = []
    with Stored(tmp_path / "f", tensors) as stored:
        plan, _ = stored.plan(0, 1, 2)
        execute(plan, [stored.source], Targets(plan), progress=done.append, completed=completed.append)
    assert done[-1] == plan.read_bytes
    assert done == sorted(done)
    assert sorted(completed) == [0, 1, 2]
