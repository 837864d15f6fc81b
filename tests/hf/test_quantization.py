"""``sluice.hf.from_pretrained`` of models that torchao quantizes or has quantized, compared with the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from support.hf_comparing import assert_same

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install 'sluice[quantize]'")

_INT8 = torchao.Int8WeightOnlyConfig()
_CONFIGS = {
    "int8": _INT8,
    "float8": torchao.Float8WeightOnlyConfig(),
    "some": torchao.FqnToConfig({"re:.*q_proj": _INT8}),
    "all but some": torchao.FqnToConfig({"re:.*q_proj": None, "re:.*_proj": _INT8}),
}


def _saved(transformers: Any, path: Path, *, tied: bool = False) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def _both(transformers: Any, path: Path, **arguments: Any) -> tuple[Any, Any]:
    return (
        sluice.hf.from_pretrained(path, **arguments),
        transformers.AutoModelForCausalLM.from_pretrained(path, **arguments),
    )


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_not_convert": ["mlp"]}, {"include_input_output_embeddings": True}]
)
@pytest.mark.parametrize("kind", ["int8", "float8", "some", "all but some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_quantized_as_the_library_does(
    transformers: Any, tmp_path: Path, dtype: torch.dtype, kind: str, options: dict[str, Any]
) -> None:
    _saved(transformers, tmp_path, tied=kind == "int8")
    config = transformers.TorchAoConfig(_CONFIGS[kind], **options)
    ours, theirs = _both(transformers, tmp_path, quantization_config=config, dtype=dtype)
    assert_same(ours, theirs)
    assert (ours.is_quantized, ours.quantization_method) == (True, theirs.quantization_method)
    assert type(ours.hf_quantizer) is type(theirs.hf_quantizer)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["int8", "float8", "some"])
def test_quantized_directories_are_loaded_without_full_precision(
    transformers: Any, tmp_path: Path, kind: str, *, tied: bool
) -> None:
    _saved(transformers, tmp_path / "plain", tied=tied)
    quantized = sluice.hf.from_pretrained(
        tmp_path / "plain", quantization_config=transformers.TorchAoConfig(_CONFIGS[kind])
    )
    quantized.save_pretrained(tmp_path / "quantized")
    assert_same(*_both(transformers, tmp_path / "quantized"))


def test_pickled_quantized_weights_are_loaded(transformers: Any, tmp_path: Path) -> None:
    _saved(transformers, tmp_path / "plain", tied=True)
    config = transformers.TorchAoConfig(_INT8)
    quantized = sluice.hf.from_pretrained(tmp_path / "plain", quantization_config=config)
    quantized.config.save_pretrained(tmp_path / "quantized")
    torch.save(quantized.state_dict(), tmp_path / "quantized" / "pytorch_model.bin")
    assert_same(*_both(transformers, tmp_path / "quantized"))


def test_what_is_not_supported_is_refused(transformers: Any, tmp_path: Path) -> None:
    _saved(transformers, tmp_path)
    with pytest.raises(TypeError, match="write TorchAoConfig"):
        sluice.hf.from_pretrained(tmp_path, quantization_config=_INT8)
    with pytest.raises(sluice.UnsupportedError, match="expected torchao or bitsandbytes"):
        sluice.hf.from_pretrained(tmp_path, quantization_config=transformers.FPQuantConfig())
    untied = transformers.TorchAoConfig(_INT8, untie_embedding_weights=True)
    with pytest.raises(sluice.UnsupportedError, match="untie_embedding_weights"):
        sluice.hf.from_pretrained(tmp_path, quantization_config=untied)


def test_a_damaged_description_is_refused(transformers: Any, tmp_path: Path) -> None:
    _saved(transformers, tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    for broken in ({}, {"quant_type": {"default": {"_type": "os.system", "_data": {}}}}):
        settings["quantization_config"] = {"quant_method": "torchao", **broken}
        file.write_text(json.dumps(settings), encoding="utf-8")
        with pytest.raises(sluice.UnsupportedError, match="refuses the quantization_config"):
            sluice.hf.from_pretrained(tmp_path)
