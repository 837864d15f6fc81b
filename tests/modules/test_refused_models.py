"""Models that libraries wrapped, sharded or quantized get advice; the types here only have the names of theirs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import sluice
from sluice.modules.refused_models import advice_for


def kind(base: type, module: str, name: str = "Wrapped") -> type:
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("peft.peft_model", "before get_peft_model"),
        ("bitsandbytes.nn.modules", "before its parameters are quantized"),
        ("torchao.quantization", "quantize_"),
        ("hqq.core.quantize", "quantize it afterwards"),
        ("torch.ao.nn.quantized.dynamic.modules.linear", "quantize it afterwards"),
        ("torch.distributed.fsdp.fully_sharded_data_parallel", "sync_module_states=True"),
    ],
)
def test_a_refused_model_of_a_known_library(tmp_path: Path, package: str, message: str) -> None:
    torch.save({"other.weight": torch.ones(1)}, tmp_path / "m.pth")
    model = nn.Sequential(kind(nn.Linear, package)(4, 3))
    for load in (sluice.load_into, sluice.plan):
        with pytest.raises(sluice.MismatchError) as caught:
            load(model, tmp_path / "m.pth")
        assert message in caught.value.advice
        assert str(caught.value).endswith(caught.value.advice)
        assert caught.value.advice.startswith("Nothing was changed. The ")


def test_parameters_count_as_well_as_modules() -> None:
    model = nn.Linear(2, 2)
    assert advice_for(model) is None
    model.weight = kind(nn.Parameter, "torchao.dtypes")(torch.ones(2, 2))
    assert "torchao" in str(advice_for(model))
    divided = nn.Linear(2, 2)
    divided.weight.ds_id = 0  # type: ignore[attr-defined]  # DeepSpeed's mark
    assert "ZeRO-3" in str(advice_for(divided))


def test_a_model_that_fits_is_loaded(tmp_path: Path) -> None:
    model = kind(nn.Linear, "peft.tuners.lora.layer")(4, 3)
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "m.pth")
    assert sluice.load_into(model, tmp_path / "m.pth").tensors == 2


def test_floats_are_not_cast_to_quantized_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes keeps int8 weights in a Parameter of the same shape; the scales would not fit them."""
    model = nn.Linear(4, 3, bias=False)
    model.weight = kind(nn.Parameter, "bitsandbytes.nn.modules", "Int8Params")(
        torch.full((3, 4), 7, dtype=torch.int8), requires_grad=False
    )
    torch.save({"weight": torch.randn(3, 4)}, tmp_path / "floats.pth")
    torch.save({"weight": torch.ones(3, 4, dtype=torch.int8)}, tmp_path / "quantized.pth")
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    with pytest.raises(
        sluice.MismatchError, match=r"quantized, but not in the checkpoint \(1\):\n.*torch.int8"
    ) as caught:
        sluice.load_into(model, tmp_path / "floats.pth")
    assert "bitsandbytes" in caught.value.advice
    assert model.weight.eq(7).all()
    sluice.load_into(model, tmp_path / "quantized.pth")
    assert model.weight.eq(1).all()
