"""Names of dtypes as people write them, and dtypes that only some versions of torch have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from sluice._dtypes import parse_dtype, torch_dtype
from support.dtypes import TORCH_DTYPES


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("torch.bfloat16", "bfloat16"), ("BF16", "bfloat16"),
        (torch.bfloat16, "bfloat16"), (" bf16 ", "bfloat16"),
        ("half", "float16"), ("fp16", "float16"), ("float16", "float16"), ("torch.half", "float16"), ("F16", "float16"),
        (torch.half, "float16"),
        ("float", "float32"), ("fp32", "float32"), ("f32", "float32"), ("FLOAT32", "float32"), (torch.float, "float32"),
        ("double", "float64"), ("fp64", "float64"), ("F8_E4M3", "float8_e4m3fn"), ("torch.float8_e5m2", "float8_e5m2"),
        ("auto", "auto"), ("int8", "int8"), (torch.int8, "int8"), ("bool", "bool"),
    ],
)  # fmt: skip
def test_usual_names(written: object, name: str) -> None:
    assert parse_dtype(written) == name


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_has_its_own_name(name: str) -> None:
    assert parse_dtype(name) == parse_dtype(getattr(torch, name)) == name


@pytest.mark.parametrize("written", ["", "bf61", "torch.", "fp8", "torch.Tensor", 16, True, float, torch.quint8])
def test_anything_else_is_one_error_that_lists_the_names(written: object) -> None:
    with pytest.raises(ValueError, match="is not one of") as caught:
        parse_dtype(written)
    for name in ("auto", "bfloat16 (bf16, BF16)", "float16 (half, fp16, F16)", "float32 (float, fp32, F32)", "int8"):
        assert name in str(caught.value)
    assert repr(written) in str(caught.value)


def test_a_restricted_list_names_only_what_it_accepts() -> None:
    assert parse_dtype("half", auto=False, floats_only=True) == "float16"
    for written in ("auto", "int8", "bool"):
        with pytest.raises(ValueError, match=f"'{written}' is not one of the floating-point dtypes float16 ") as caught:
            parse_dtype(written, auto=False, floats_only=True)
        assert "int8" not in str(caught.value).partition("one of")[2]
        assert "auto (" not in str(caught.value)


def test_a_dtype_that_the_installed_torch_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(3).to(torch.float8_e5m2)}, tmp_path / "f.pth")
    monkeypatch.delattr(torch, "float8_e5m2")
    with pytest.raises(sluice.UnsupportedError, match=r"torch .* has no dtype float8_e5m2; a later version"):
        sluice.load_state_dict(tmp_path / "f.pth")
    with pytest.raises(sluice.UnsupportedError, match="has no dtype print"):
        torch_dtype("print")
