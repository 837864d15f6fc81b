"""Conjugated and negated views: lazy in a state dict, as in the file, and computed in a module."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import sluice
from sluice._dtypes import dtype_name
from sluice.records import Elements, MathBit
from support.fake_accelerator import FakeAccelerator
from support.hostile_archives import storage, tensor_call, torch_archive
from support.oracles import bits, same
from support.plans import entry_of, load, request


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


@pytest.mark.parametrize("live", [True, False])
def test_modules_get_the_values(tmp_path: Path, live: bool) -> None:
    value = state()
    torch.save(value, tmp_path / "f.pth")
    with torch.device("cpu" if live else "meta"):
        model = Waves()
    sluice.load_into(model, tmp_path / "f.pth")
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


def test_mapped_models_copy_conjugated_and_negated_tensors(tmp_path: Path) -> None:
    value = state()
    torch.save(value, tmp_path / "f.pth")
    with torch.device("meta"):
        model = Waves()
    report = sluice.load_into(model, tmp_path / "f.pth", dtype="auto", place="map")
    assert any("conjugated or negated in the file" in note for note in report.notes)
    assert bits(model.large) == bits(value["large"].resolve_conj())
