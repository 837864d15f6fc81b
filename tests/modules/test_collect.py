"""Collection of the tensors of a module, and refused tensors and models; their types only have names of libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import sluice
from sluice._errors import MismatchError
from sluice.modules.collect import collect
from sluice.modules.refused_models import advice_for
from support.trained_net import Attention, empty, load, problem, unchanged


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, 1).expand(1, 4),
        torch.zeros(6).as_strided((3, 2), (1, 1)),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ],
)
def test_memory_that_holds_an_element_more_than_once_is_not_filled_in_place(tensor: torch.Tensor) -> None:
    module = nn.Module()
    module.register_buffer("b", tensor)
    assert not collect(module).outline.slots[0].in_place
    values = torch.arange(tensor.numel()).to(tensor.dtype).reshape(tensor.shape)
    load(module, {"b": values})
    assert torch.equal(module.get_buffer("b"), values)


def fake() -> nn.Module:
    with FakeTensorMode():
        return nn.Linear(2, 2)


def functional() -> nn.Module:
    module = nn.Linear(2, 2)
    module.bias = nn.Parameter(torch._to_functional_tensor(torch.zeros(2)))
    return module


def sparse() -> nn.Module:
    module = nn.Module()
    module.register_buffer("bias", torch.eye(3).to_sparse())
    return module


def subclass() -> nn.Module:
    class Own(torch.Tensor):
        pass

    module = nn.Linear(2, 2)
    module.register_buffer("own", torch.zeros(2).as_subclass(Own))
    return module


@pytest.mark.parametrize(
    ("build", "name", "kind"),
    [
        (fake, "'weight'", "FakeTensor"),
        (functional, "'bias'", "functional"),
        (sparse, "'bias'", "sparse_coo"),
        (subclass, "'own'", "Own"),
    ],
)
def test_tensors_without_memory_of_their_own_are_refused_by_name_and_type(
    build: Callable[[], nn.Module], name: str, kind: str
) -> None:
    with pytest.raises(MismatchError) as caught:
        load(build(), {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, strict=False)
    assert name in str(caught.value)
    assert kind in str(caught.value)


def test_tensors_outside_the_state_dict_are_named_if_on_meta() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            self.doubled = self.attention.query.weight * 2
            self.known = [self.attention.query.weight]
            self.tables = {"a": (torch.zeros(2), 1)}

    with torch.device("meta"):
        module = Caching()
    text = problem(module, Caching().state_dict())
    assert "'attention.frequencies' is on the meta device" in text
    assert "sluice.empty_init()" in text
    assert "'doubled'" in text
    assert "'tables'" in text
    assert "known" not in text
    text = problem(empty(Caching), Caching().state_dict())
    assert "'doubled'" in text
    assert "frequencies" not in text
    assert "tables" not in text


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
    for verb in (sluice.load_into, sluice.plan):
        with pytest.raises(sluice.MismatchError) as caught:
            verb(model, tmp_path / "m.pth")
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


def test_a_model_that_fits_is_loaded() -> None:
    model = kind(nn.Linear, "peft.tuners.lora.layer")(4, 3)
    assert load(model, nn.Linear(4, 3).state_dict()).tensors == 2


def test_floats_are_not_cast_to_quantized_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes keeps int8 weights in a Parameter of the same shape; the scales would not fit them."""
    model = nn.Linear(4, 3, bias=False)
    model.weight = kind(nn.Parameter, "bitsandbytes.nn.modules", "Int8Params")(
        torch.full((3, 4), 7, dtype=torch.int8), requires_grad=False
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    refused = r"quantized, but not in the checkpoint \(1\):\n.*torch.int8"
    with unchanged(model), pytest.raises(sluice.MismatchError, match=refused) as caught:
        load(model, {"weight": torch.randn(3, 4)})
    assert "bitsandbytes" in caught.value.advice
    load(model, {"weight": torch.ones(3, 4, dtype=torch.int8)})
    assert model.weight.eq(1).all()
