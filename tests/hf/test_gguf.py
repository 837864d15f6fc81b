"""GGUF files into models of transformers, against transformers' own reading of them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice._errors import FormatError, UnsupportedError
from support.directories import assert_same
from support.gguf_files import number, packed, plain, text, write
from support.oracles import bits
from support.trained_net import empty

pytest.importorskip("gguf", reason="needs the tables of names: pip install gguf")

from sluice.hf._gguf import _restored

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
HEADS = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**HEADS, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2ForCausalLM", HEADS),
    "qwen3": ("Qwen3ForCausalLM", HEADS),
    "phi3": ("Phi3ForCausalLM", {**HEADS, "pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gemma": ("GemmaForCausalLM", HEADS),
    "gemma2": ("Gemma2ForCausalLM", HEADS),
    "gemma3": ("Gemma3ForCausalLM", {**HEADS, "sliding_window": 32}),
}


def _model(transformers: Any, architecture: str) -> Any:
    name, sizes = MODELS[architecture]
    made = getattr(transformers, name)
    return empty(lambda: made(made.config_class(**sizes)))


def _file(path: Path, model: Any, architecture: str) -> Path:
    """Write random tensors under the names and in the layout of llama.cpp."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    table = get_tensor_name_map(next(code for code, name in MODEL_ARCH_NAMES.items() if name == architecture), 2)
    tensors = {}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        owner, _, own = name.rpartition(".")
        new = table.get_name(owner)
        if new is None or name in tied:
            continue
        shape = tuple(tensor.shape)
        if architecture == "gpt2" and len(shape) == 2 and ".h." in name:
            shape = shape[::-1]
        torch.manual_seed(seed)
        tensors[f"{new}.{own}"] = packed(shape, seed=seed)[0] if len(shape) == 2 else plain(torch.randn(shape))
    counts = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
    counts |= {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16, "vocab_size": 96}
    counts |= {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 32}
    metadata: dict[str | bytes, bytes] = {"general.architecture": struct.pack("<I", 8) + text(architecture)}
    metadata |= {f"{architecture}.{key}": number(4, "I", value) for key, value in counts.items()}
    return write(path, tensors, metadata)


@pytest.mark.parametrize("architecture", MODELS)
def test_models_equal_those_of_transformers(
    transformers: Any, tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # transformers' progress bar starts a thread
    model = _model(transformers, architecture)
    file = _file(tmp_path / "model.gguf", model, architecture)
    report = sluice.load_into(model, file, rules=sluice.hf.gguf_rules(model, file), dtype="float32")
    assert not report.missing
    assert not report.unexpected
    if architecture == "gemma":  # transformers refuses its files
        with sluice.open(file) as checkpoint:
            stored = checkpoint["blk.1.ffn_norm.weight"].read()
        own = model.get_parameter("model.layers.1.post_attention_layernorm.weight")
        assert bits(own.data) == bits(stored - 1)
        return
    made = getattr(transformers, MODELS[architecture][0])
    theirs = made.from_pretrained(tmp_path, gguf_file=file.name, config=model.config, dtype=torch.float32)
    assert_same(model.state_dict(), theirs.state_dict())


def test_a_llama_without_grouped_queries_has_as_many_heads_of_keys() -> None:
    numbers = {"llama.attention.head_count": "4", "llama.embedding_length": "64"}
    grouped = {**numbers, "llama.attention.head_count_kv": "4"}
    assert list(map(str, _restored("llama", numbers, "f"))) == list(map(str, _restored("llama", grouped, "f")))


def test_other_files_are_refused(transformers: Any, tmp_path: Path) -> None:
    model = _model(transformers, "llama")
    unknown: dict[str | bytes, bytes] = {"general.architecture": struct.pack("<I", 8) + text("mamba")}
    file = write(tmp_path / "other.gguf", {"b": plain(torch.ones(2))}, unknown)
    with pytest.raises(UnsupportedError, match="restored by names") as caught:
        sluice.hf.gguf_rules(model, file)
    assert caught.value.found == "mamba"
    for count, message in (number(4, "I", 1000), "fewer tensors"), (struct.pack("<I", 8) + text("9" * 5000), "number"):
        known: dict[str | bytes, bytes] = {
            "general.architecture": struct.pack("<I", 8) + text("llama"),
            "llama.block_count": count,
        }
        with pytest.raises(FormatError, match=message):
            sluice.hf.gguf_rules(model, write(tmp_path / "few.gguf", {"b": plain(torch.ones(2))}, known))
    torch.save({"b": torch.ones(2)}, tmp_path / "plain.pth")
    with pytest.raises(FormatError, match="not a GGUF file"):
        sluice.hf.gguf_rules(model, tmp_path / "plain.pth")
