"""Files of GPTQ, AWQ and llm-compressor: the plain tensors that they hold, in modules that have such tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import sluice
from support.oracles import bits

_WORDS = torch.arange(8 * 32, dtype=torch.int32).mul(0x01234567)

LAYOUTS: dict[str, dict[str, torch.Tensor]] = {
    "gptq": {
        "qweight": _WORDS.view(8, 32),
        "qzeros": torch.full((2, 4), 0x77777777, dtype=torch.int32),
        "scales": torch.linspace(0.01, 1, 64).half().view(2, 32),
        "g_idx": torch.arange(64, dtype=torch.int32) // 32,
    },
    "awq": {
        "qweight": _WORDS.view(64, 4),
        "qzeros": torch.full((2, 4), -0x77777777, dtype=torch.int32),
        "scales": torch.linspace(0.01, 1, 64).half().view(2, 32),
    },
    "compressed-tensors, packed": {
        "weight_packed": _WORDS.view(32, 8),
        "weight_scale": torch.linspace(0.01, 1, 64).bfloat16().view(32, 2),
        "weight_shape": torch.tensor([32, 64]),
        "weight_zero_point": torch.zeros(4, 2, dtype=torch.int32),
    },
    "compressed-tensors, float8": {
        "weight": torch.linspace(-3, 3, 32 * 64).view(32, 64).to(torch.float8_e4m3fn),
        "weight_scale": torch.linspace(0.01, 1, 32).view(32, 1),
        "input_scale": torch.tensor(0.5),
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_files_are_plain_tensors(tmp_path: Path, layout: str) -> None:
    tensors = {f"layers.0.proj.{name}": tensor for name, tensor in LAYOUTS[layout].items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        proj = nn.Module()
        for name, tensor in LAYOUTS[layout].items():
            proj.register_buffer(name, torch.empty_like(tensor))
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"proj": proj})])})
    sluice.load_into(model, tmp_path / "model.safetensors")
    expected = load_file(tmp_path / "model.safetensors")
    assert {name: bits(value) for name, value in model.state_dict().items()} == {
        name: bits(value) for name, value in expected.items()
    }
    state = sluice.load_state_dict(tmp_path / "model.safetensors")
    assert {name: bits(value) for name, value in state.items()} == {name: bits(each) for name, each in expected.items()}
