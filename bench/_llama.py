"""A Llama-shaped model with the parameter names of transformers, and its checkpoints in Hugging Face's layout.

Only parameters matter here, so the modules have no ``forward``. The directory has a ``config.json``, so that
transformers builds its own ``LlamaForCausalLM`` from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn

from bench._common import write_shards
from sluice.benchmark.gpt2 import random_weight, write_checkpoint

__all__ = ["LLAMA_1B", "LLAMA_TINY", "LlamaShape", "llama", "write_directory"]


class LlamaShape(TypedDict):
    """Sizes, with the names of ``transformers.LlamaConfig``."""

    #: Size of the vocabulary, in tokens.
    vocab_size: int
    #: Width of the residual stream.
    hidden_size: int
    #: Width of the feed-forward layer.
    intermediate_size: int
    #: Number of layers.
    num_hidden_layers: int
    #: Attention heads of a layer.
    num_attention_heads: int
    #: Key and value heads of a layer.
    num_key_value_heads: int


#: TinyLlama's shape: 1.1 billion parameters in 201 tensors, with an output head of its own.
LLAMA_1B = LlamaShape(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
)

#: For tests.
LLAMA_TINY = LlamaShape(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class _Attention(nn.Module):
    def __init__(self, width: int, key_width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, key_width, bias=False)
        self.v_proj = nn.Linear(width, key_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)


class _FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)


class _Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width = shape["hidden_size"]
        self.self_attn = _Attention(width, width // shape["num_attention_heads"] * shape["num_key_value_heads"])
        self.mlp = _FeedForward(width, shape["intermediate_size"])
        self.input_layernorm = _Norm(width)
        self.post_attention_layernorm = _Norm(width)


class _Body(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape["vocab_size"], shape["hidden_size"])
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape["num_hidden_layers"]))
        self.norm = _Norm(shape["hidden_size"])


class _Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.model = _Body(shape)
        self.lm_head = nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False)


def llama(**shape: int) -> nn.Module:
    """Return a model of this shape; without arguments, of ``LLAMA_1B``."""
    return _Llama(LlamaShape(**{**LLAMA_1B, **shape}))  # type: ignore[typeddict-item]  # the same names


def write_directory(folder: Path, shape: LlamaShape, *, shards: int) -> None:
    """Write random weights in bf16 as a Hugging Face directory, all of which are in memory meanwhile.

    Args:
        folder: The directory to create.
        shape: The model.
        shards: Number of files.
    """
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in llama(**shape).state_dict().items()}
    state = {name: random_weight(name, each).to(torch.bfloat16) for name, each in shapes.items()}
    if shards == 1:
        folder.mkdir(parents=True)
        write_checkpoint(state, folder / "model.safetensors")
    else:
        write_shards(state, folder, shards)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
