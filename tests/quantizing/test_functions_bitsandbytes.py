"""Loads into layers of bitsandbytes: the bits of a model that was loaded first and moved to its device then."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice.quantizing.inner_tensors import inner_tensors
from support.hf_comparing import assert_same_weights
from support.trained_net import empty

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

ROWS = 2528  # several pieces, and a rest; the library computes with multiples of 32


class Net(nn.Module):
    """Layers of a class, and a norm that is not quantized."""

    def __init__(self, layer: Any = nn.Linear, **options: Any) -> None:
        super().__init__()
        self.up = layer(256, ROWS, **options)
        self.down = layer(256, 64, bias=False, **options)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.norm(self.down(x)), self.up(x)], dim=1)


_LAYERS: dict[str, tuple[str, dict[str, object]]] = {
    "nf4": ("Linear4bit", {"quant_type": "nf4", "compress_statistics": False}),
    "nf4-nested": ("Linear4bit", {"quant_type": "nf4"}),
    "fp4": ("LinearFP4", {"compress_statistics": False, "quant_storage": torch.bfloat16}),
    "int8": ("Linear8bitLt", {"has_fp16_weights": False}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    torch.manual_seed(0)
    model, path = Net(), tmp_path_factory.mktemp("bitsandbytes") / "net.pth"
    torch.save(model.state_dict(), path)
    return model, path


def _net(kind: str) -> Net:
    name, options = _LAYERS[kind]
    return Net(getattr(bnb.nn, name), **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", _LAYERS)
def test_weights_are_those_of_a_model_that_was_moved(trained: tuple[Net, Path], kind: str, dtype: torch.dtype) -> None:
    model, path = trained
    expected = _net(kind)
    expected.load_state_dict(model.state_dict())
    expected.to(dtype).to("cpu")
    found = empty(partial(_net, kind))
    report = sluice.load_into(found, path, quantize="bitsandbytes", dtype=dtype)
    assert_same_weights(found, expected)
    assert report.loaded_bytes == sum(part.nbytes for each in found.parameters() for part in inner_tensors(each))
    (note,) = [note for note in report.notes if "quantized" in note]
    assert ("pieces of rows" in note) == (kind != "nf4-nested")  # its scales have one mean
    x = torch.randn(3, 256, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(found.eval()(x), expected.eval()(x))


def test_layer_and_weight_share_their_state(trained: tuple[Net, Path]) -> None:
    found = empty(partial(_net, "nf4-nested"))
    sluice.load_into(found, trained[1], quantize="bitsandbytes")
    layer: Any = found.up
    assert layer.weight.module is layer
    assert layer.weight.quant_state is layer.quant_state
    assert layer.quant_state.shape == (ROWS, 256)
    # Without data, the library would have kept a table on the meta device for every later call.
    assert bnb.functional.quantize_blockwise(torch.ones(64))[0].device.type == "cpu"


def test_without_the_argument_weights_wait_for_their_device(trained: tuple[Net, Path]) -> None:
    model, path = trained
    found = empty(partial(_net, "nf4"))
    sluice.load_into(found, path)
    assert torch.equal(found.up.weight.float(), model.up.weight)
    assert found.to("cpu").up.weight.dtype == torch.uint8


def test_a_model_without_such_layers_is_refused(trained: tuple[Net, Path]) -> None:
    found = empty(Net)
    with pytest.raises(ValueError, match="no layers of bitsandbytes"):
        sluice.load_into(found, trained[1], quantize="bitsandbytes")
    assert found.up.weight.is_meta
