"""``sluice.hf.from_pretrained`` of models that bitsandbytes quantizes or has quantized, compared with the library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sluice
from support.hf_comparing import assert_same, loaded_both_ways, save_llama

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

_OPTIONS: dict[str, dict[str, object]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4-bf16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
    "int8-some": {"load_in_8bit": True, "llm_int8_skip_modules": ["mlp", "lm_head"]},
}
_KEY = "model.layers.0.mlp.up_proj"
_TEXT = f"{_KEY}.weight.quant_state.bitsandbytes__nf4"


def _save(transformers: Any, path: Path, kind: str) -> None:
    if kind == "llama":
        save_llama(transformers, path)
        return
    torch.manual_seed(0)  # its Conv1D layers hold the transposed weight
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(path)


def _save_changed(
    transformers: Any, path: Path, kind: str, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    """Write a quantized model and change its tensors."""
    save_llama(transformers, path / "plain")
    config = transformers.BitsAndBytesConfig(**_OPTIONS[kind])
    sluice.hf.from_pretrained(path / "plain", quantization_config=config).save_pretrained(path)
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", _OPTIONS)
def test_models_are_those_of_the_library(
    transformers: Any, tmp_path: Path, kind: str, model: str, dtype: torch.dtype
) -> None:
    _save(transformers, tmp_path / "plain", model)
    config = transformers.BitsAndBytesConfig(**_OPTIONS[kind])
    ours, theirs = loaded_both_ways(transformers, tmp_path / "plain", quantization_config=config, dtype=dtype)
    assert_same(ours, theirs)
    ours.save_pretrained(tmp_path / "quantized")  # before it computes, which rearranges weights on some processors
    ids = torch.arange(10)[None]
    with torch.no_grad():
        logits = theirs(ids).logits
        assert torch.equal(ours(ids).logits, logits)
    again, theirs = loaded_both_ways(transformers, tmp_path / "quantized")
    assert_same(again, theirs)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)


def test_scales_in_rows_and_columns(transformers: Any, tmp_path: Path) -> None:
    """A model that has computed with AVX-512 is saved so."""

    def reshape(state: dict[str, torch.Tensor]) -> None:
        state[f"{_KEY}.weight.absmax"] = state[f"{_KEY}.weight.absmax"].reshape(3, -1).contiguous()

    _save_changed(transformers, tmp_path, "nf4", reshape)
    assert_same(*loaded_both_ways(transformers, tmp_path))


def _description(**changes: object) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        text = json.dumps({**json.loads(bytes(state[_TEXT].tolist())), **changes}).encode()
        state[_TEXT] = torch.tensor(list(text), dtype=torch.uint8)

    return change


def _replaced(description: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda state: state.update({_TEXT: description})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_description(shape=[64, 192]), "does not fit its layer"),
        (_description(dtype="load"), "does not fit its layer"),
        (_description(blocksize=128), "does not fit its layer"),
        (_description(nested_blocksize=256, nested_offset=0.5), "does not fit its layer"),
        (_description(shape="x"), "is damaged"),
        (_replaced(torch.zeros(90, dtype=torch.uint8)), "is damaged"),
        (_replaced(torch.tensor(list(b'{"dtype": "\xff"}'), dtype=torch.uint8)), "is damaged"),
        (lambda state: state.pop(f"{_KEY}.weight.absmax"), "up_proj._weight_absmax"),
        (lambda state: state.update({f"{_KEY}.weight": state[f"{_KEY}.weight"][:-64].clone()}), "up_proj.weight"),
        (_replaced(torch.zeros(1 << 20, dtype=torch.uint8)), "up_proj._weight_quant_state"),
    ],
)
def test_damaged_descriptions_are_mismatches(
    transformers: Any, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    _save_changed(transformers, tmp_path, "nf4", change)
    with pytest.raises(sluice.MismatchError, match=message):
        sluice.hf.from_pretrained(tmp_path)


def test_other_orders_of_eight_bits_are_refused(transformers: Any, tmp_path: Path) -> None:
    _save_changed(transformers, tmp_path, "int8", lambda state: state[f"{_KEY}.weight_format"].fill_(2))
    with pytest.raises(sluice.MismatchError, match="row by row"):
        sluice.hf.from_pretrained(tmp_path)
