"""Requests through planner and engine, compared with torch's view of the same bytes.

Conjugated and negated views are lazy in a state dict, as in the file, and computed in a module.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import sluice
from sluice._dtypes import dtype_name, torch_dtype
from sluice.engine.targets import Targets
from sluice.records import Elements, MathBit
from support.dtypes import TORCH_DTYPES
from support.fake_accelerator import FakeAccelerator
from support.hostile_archives import storage, tensor_call, torch_archive
from support.oracles import bits, same
from support.plans import MIB, Stored, entry_of, execute, load, request
from support.trained_net import load as load_module

DTYPES = [torch_dtype(name) for name in TORCH_DTYPES]


def random_storage(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


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
    assert same(found, tensors)


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


def numbers(count: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.randn(count, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_state_dicts_keep_the_views(tmp_path: Path, dtype: torch.dtype, zipped: bool) -> None:
    whole = numbers(600, dtype)
    imaginary = numbers(600, dtype).conj().imag
    value = {
        "whole": whole,
        "conj": whole.conj(),
        "rows": whole.view(20, 30).conj()[2:7],
        "transposed": whole.view(20, 30).conj().t(),
        "twice": whole.conj().conj(),
        "neg": imaginary,
        "neg rows": imaginary[5:9],
        "parameter": torch.nn.Parameter(whole.conj()),
        "empty": whole[:0].conj(),
    }
    torch.save(value, tmp_path / "f.pth", _use_new_zipfile_serialization=zipped)
    ours = sluice.load_state_dict(tmp_path / "f.pth")
    assert same(dict(ours), torch.load(tmp_path / "f.pth", weights_only=True, mmap=False))
    assert ours["conj"].is_conj()
    assert ours["neg"].is_neg()
    assert ours["conj"].untyped_storage().data_ptr() == ours["whole"].untyped_storage().data_ptr()
    assert not ours["conj"]._is_view()
    with sluice.open(tmp_path / "f.pth") as checkpoint:
        for name, tensor in value.items():
            assert bits(checkpoint[name].read()) == bits(tensor.resolve_conj().resolve_neg())
        assert bits(checkpoint["neg"][3:40:3].read()) == bits(value["neg"][3:40:3].resolve_neg())
        out = torch.zeros(600, dtype=dtype)
        assert checkpoint["conj"].read(out=out) is not None
        assert bits(out) == bits(whole.conj().resolve_conj())


def test_both_bits_at_once() -> None:
    call = tensor_call(storage("0", 3, kind="ComplexFloatStorage"), shape=(3,), extra=({"conj": True, "neg": True},))
    held = numbers(3)
    content = torch_archive({"w": call}, {"0": bits(held)})
    expected = torch.load(io.BytesIO(content), weights_only=True)
    assert expected.keys() == {"w"}
    ours = sluice.load_state_dict(io.BytesIO(content))
    assert same(dict(ours), expected)
    with sluice.open(io.BytesIO(content)) as checkpoint:
        assert bits(checkpoint["w"].read()) == bits(-held.conj().resolve_conj())


class Waves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(400, 500, dtype=torch.complex64))
        self.small = torch.nn.Parameter(torch.zeros(7, dtype=torch.complex128))
        self.real = torch.nn.Parameter(torch.zeros(700))


def state() -> dict[str, torch.Tensor]:
    return {
        "large": numbers(200_000).view(400, 500).conj(),
        "small": numbers(7).conj(),
        "real": numbers(700, torch.complex128).conj().imag,
    }


@pytest.mark.parametrize(("device", "place"), [("cpu", "copy"), ("meta", "copy"), ("meta", "map")])
def test_modules_get_the_values(device: str, place: str) -> None:
    value = state()
    with torch.device(device):
        model = Waves()
    notes = load_module(model, value, place=place).notes
    assert any("conjugated or negated in the file" in note for note in notes) == (place == "map")
    for name, parameter in model.named_parameters():
        assert not parameter.is_conj()
        assert not parameter.is_neg()
        assert bits(parameter) == bits(value[name].resolve_conj().resolve_neg().to(parameter.dtype))


@pytest.mark.parametrize("tied_values", ["same", "other"])
def test_a_tensor_and_its_conjugate_are_not_the_same_bytes(tmp_path: Path, tied_values: str) -> None:
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.zeros(50, dtype=torch.complex64))
    model.b = model.a
    whole = numbers(50) if tied_values == "other" else numbers(50).real.to(torch.complex64)
    torch.save({"a": whole, "b": whole.conj()}, tmp_path / "f.pth")
    with pytest.raises(sluice.MismatchError, match="tied in the model and differ"):  # -0.0 is not 0.0
        sluice.load_into(model, tmp_path / "f.pth")


@pytest.mark.parametrize("cores", [2, 8])
def test_accelerators(tmp_path: Path, cores: int) -> None:
    value = state()
    held: list[tuple[torch.Tensor, tuple[MathBit, ...], str]] = [
        (value["large"].conj(), ("conj",), "complex64"),
        (value["small"].conj(), ("conj",), "complex128"),
        (torch.randn(3000), ("neg",), "float32"),
        (torch.randn(3000), ("neg",), "bfloat16"),
        (numbers(5), ("conj", "neg"), "complex64"),
    ]
    requests = [
        request(
            f"t{i}",
            replace(entry_of(tensor, i), elements=Elements(dtype=dtype_name(tensor.dtype), math_bits=some)),
            device="fake:0",
            dtype=dtype,
        )
        for i, (tensor, some, dtype) in enumerate(held)
    ]
    tensors = [tensor for tensor, _, _ in held]
    loaded = load(tmp_path / "f", tensors, requests, fake=FakeAccelerator(seed=3), cores=cores)
    for found, (tensor, some, _) in zip(loaded, held, strict=True):
        expected = tensor.conj().resolve_conj() if "conj" in some else tensor
        expected = -expected if "neg" in some else expected
        assert bits(found) == bits(expected.to(found.dtype))


def test_rules_see_the_values(tmp_path: Path) -> None:
    value = {"a": numbers(60).view(6, 10).conj(), "b": numbers(60).view(6, 10), "n": numbers(8).conj().imag}
    torch.save(value, tmp_path / "f.pth")
    rules = sluice.rules
    ours = sluice.load_state_dict(
        tmp_path / "f.pth",
        rules=[
            rules.concatenate(["a", "b"], "ab"),
            rules.scale("n", 3.0),
            rules.resize("n", 11, fill=7.0),
        ],
    )
    assert not ours["ab"].is_conj()
    assert bits(ours["ab"]) == bits(torch.cat([value["a"], value["b"]]))
    assert bits(ours["n"][:8]) == bits(value["n"] * 3.0)
    turned = sluice.load_state_dict(tmp_path / "f.pth", rules=[rules.transpose("a"), rules.split("b", ["c", "d"])])
    assert turned["a"].is_conj()
    assert bits(turned["a"]) == bits(value["a"].t())
