"""``sluice.hf.from_pretrained`` of models that torchao quantizes or has quantized, compared with the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sluice
from support.hf_comparing import assert_same, edit_config, loaded_both_ways, save_llama

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install 'sluice[quantize]'")

_INT8 = torchao.Int8WeightOnlyConfig()
_CONFIGS = {
    "int8": _INT8,
    "float8": torchao.Float8WeightOnlyConfig(),
    "some": torchao.FqnToConfig({"re:.*q_proj": _INT8}),
    "all but some": torchao.FqnToConfig({"re:.*q_proj": None, "re:.*_proj": _INT8}),
}


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_not_convert": ["mlp"]}, {"include_input_output_embeddings": True}]
)
@pytest.mark.parametrize("kind", ["int8", "float8", "some", "all but some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_quantized_as_the_library_does(
    transformers: Any, tmp_path: Path, dtype: torch.dtype, kind: str, options: dict[str, Any]
) -> None:
    save_llama(transformers, tmp_path, tie_word_embeddings=kind == "int8")
    config = transformers.TorchAoConfig(_CONFIGS[kind], **options)
    ours, theirs = loaded_both_ways(transformers, tmp_path, quantization_config=config, dtype=dtype)
    assert_same(ours, theirs)
    assert (ours.is_quantized, ours.quantization_method) == (True, theirs.quantization_method)
    assert type(ours.hf_quantizer) is type(theirs.hf_quantizer)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["int8", "float8", "some", "int8, pickled"])
def test_quantized_directories_are_loaded_without_full_precision(
    transformers: Any, tmp_path: Path, kind: str, *, tied: bool
) -> None:
    save_llama(transformers, tmp_path / "plain", tie_word_embeddings=tied)
    config = transformers.TorchAoConfig(_CONFIGS[kind.removesuffix(", pickled")])
    quantized = sluice.hf.from_pretrained(tmp_path / "plain", quantization_config=config)
    if kind.endswith("pickled"):
        quantized.config.save_pretrained(tmp_path / "quantized")
        torch.save(quantized.state_dict(), tmp_path / "quantized" / "pytorch_model.bin")
    else:
        quantized.save_pretrained(tmp_path / "quantized")
    assert_same(*loaded_both_ways(transformers, tmp_path / "quantized"))


def test_weights_that_the_library_initializes_are_not_quantized(transformers: Any, tmp_path: Path) -> None:
    save_llama(transformers, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if "0.mlp.up_proj" not in name}, file)
    config = transformers.TorchAoConfig(_INT8)
    mlp = sluice.hf.from_pretrained(tmp_path, strict=False, quantization_config=config).model.layers[0].mlp
    assert [type(each.weight.data) is torch.Tensor for each in (mlp.up_proj, mlp.down_proj)] == [True, False]


def test_what_is_not_supported_is_refused(transformers: Any, tmp_path: Path) -> None:
    save_llama(transformers, tmp_path)
    for other in (_INT8, "int8"):
        with pytest.raises(TypeError, match="write TorchAoConfig"):
            sluice.hf.from_pretrained(tmp_path, quantization_config=other)
    with pytest.raises(sluice.UnsupportedError, match="expected torchao or bitsandbytes"):
        sluice.hf.from_pretrained(tmp_path, quantization_config=transformers.FPQuantConfig())
    untied = transformers.TorchAoConfig(_INT8, untie_embedding_weights=True)
    with pytest.raises(sluice.UnsupportedError, match="untie_embedding_weights"):
        sluice.hf.from_pretrained(tmp_path, quantization_config=untied)


def test_a_damaged_description_is_refused(transformers: Any, tmp_path: Path) -> None:
    save_llama(transformers, tmp_path)
    for broken in ({}, {"quant_type": {"default": {"_type": "os.system", "_data": {}}}}):
        edit_config(tmp_path, quantization_config={"quant_method": "torchao", **broken})
        with pytest.raises(sluice.UnsupportedError, match="refuses the quantization_config"):
            sluice.hf.from_pretrained(tmp_path)
