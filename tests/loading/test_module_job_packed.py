"""Tensors of quantized files in modules: packed ones of GGUF files are decoded, cast and changed; others are plain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sluice
from sluice import rules
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.targets import Targets
from sluice.reading import transfer
from sluice.records import DeviceFacts, Request
from support.fake_accelerator import FakeAccelerator
from support.gguf_files import packed, plain, write
from support.oracles import bits

UP, UP_VALUES = packed((96, 256), "Q4_0", seed=1)
DOWN, DOWN_VALUES = packed((96, 256), "Q8_0", seed=2)
BIAS = torch.randn(256)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 96, bias=False)
        self.down = nn.Linear(96, 256)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {"blk.0.ffn_up.weight": UP, "blk.0.ffn_down.weight": DOWN, "blk.0.ffn_down.bias": plain(BIAS)}
    return write(tmp_path / "model.gguf", tensors)


RENAME = [(r"blk\.0\.ffn_(\w+)\.(\w+)", r"\1.\2")]


@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_get_the_decoded_elements(file: Path, live: bool, dtype: torch.dtype) -> None:
    model = Net().to(dtype) if live else Net().to("meta", dtype)
    sluice.load_into(model, file, rename=RENAME, rules=[rules.transpose("down.weight")])
    assert bits(model.up.weight) == bits(UP_VALUES.to(dtype))
    assert bits(model.down.weight) == bits(DOWN_VALUES.T.to(dtype))
    assert bits(model.down.bias) == bits(BIAS.to(dtype))


def test_factors_and_joins_of_packed_tensors(file: Path) -> None:
    model = nn.Linear(256, 192, bias=False, device="meta")
    joined = rules.concatenate(("up.weight", "down.weight"), "weight")
    changed = [rules.scale("up.weight", 0.5), joined]
    sluice.load_into(model, file, rename=RENAME, rules=changed, strict=False)
    assert bits(model.weight) == bits(torch.cat([UP_VALUES * 0.5, DOWN_VALUES]))


def test_on_the_way_to_an_accelerator(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.reading.transfer.device_facts", lambda name: DeviceFacts(device=name))
    device = FakeAccelerator()
    with OpenCheckpoint.open(file) as checkpoint:
        entry = checkpoint.entries["blk.0.ffn_up.weight"]
        prepared = transfer.prepare(checkpoint, [Request(name="w", entry=entry, dtype="bfloat16", device="fake:0")])
        targets = Targets(prepared.plan, accelerators={"fake:0": device})
        (found,) = transfer.run(checkpoint, prepared, targets)[0]
    device.assert_filled_once()
    assert bits(found) == bits(UP_VALUES.bfloat16())


#: Tensors of a layer as GPTQ stores it, and of one in float8 as llm-compressor does.
QUANTIZED = {
    "qweight": torch.arange(8 * 32, dtype=torch.int32).mul(0x01234567).view(8, 32),
    "scales": torch.linspace(0.01, 1, 64).half().view(2, 32),
    "weight": torch.linspace(-3, 3, 32 * 64).view(32, 64).to(torch.float8_e4m3fn),
    "input_scale": torch.tensor(0.5),
}


def test_files_of_gptq_awq_and_llm_compressor_hold_plain_tensors(tmp_path: Path) -> None:
    save_file(QUANTIZED, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = nn.Module()
    for name, tensor in QUANTIZED.items():
        model.register_buffer(name, torch.empty_like(tensor, device="meta"))
    sluice.load_into(model, tmp_path / "model.safetensors")
    state = sluice.load_state_dict(tmp_path / "model.safetensors")
    for name, tensor in QUANTIZED.items():
        assert bits(model.get_buffer(name)) == bits(state[name]) == bits(tensor), name
