"""Tensors of quantized files in modules: packed ones of GGUF files are decoded, cast and changed; others are plain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
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


_WORDS = torch.arange(8 * 32, dtype=torch.int32).mul(0x01234567)

QUANTIZED: dict[str, dict[str, torch.Tensor]] = {
    "gptq": {
        "qweight": _WORDS.view(8, 32),
        "qzeros": torch.full((2, 4), 0x77777777, dtype=torch.int32),
        "scales": torch.linspace(0.01, 1, 64).half().view(2, 32),
        "g_idx": torch.arange(64, dtype=torch.int32) // 32,
    },
    "compressed-tensors, float8": {
        "weight": torch.linspace(-3, 3, 32 * 64).view(32, 64).to(torch.float8_e4m3fn),
        "weight_scale": torch.linspace(0.01, 1, 32).view(32, 1),
        "input_scale": torch.tensor(0.5),
    },
}


@pytest.mark.parametrize("layout", QUANTIZED)
def test_files_of_gptq_awq_and_llm_compressor_hold_plain_tensors(tmp_path: Path, layout: str) -> None:
    tensors = {f"layers.0.proj.{name}": tensor for name, tensor in QUANTIZED[layout].items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        proj = nn.Module()
        for name, tensor in QUANTIZED[layout].items():
            proj.register_buffer(name, torch.empty_like(tensor))
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"proj": proj})])})
    sluice.load_into(model, tmp_path / "model.safetensors")
    expected = load_file(tmp_path / "model.safetensors")
    assert {name: bits(value) for name, value in model.state_dict().items()} == {
        name: bits(value) for name, value in expected.items()
    }
    state = sluice.load_state_dict(tmp_path / "model.safetensors")
    assert {name: bits(value) for name, value in state.items()} == {name: bits(each) for name, each in expected.items()}
