"""A GPT-2-shaped model with the parameter names of the book's ``GPTModel``, and its checkpoints.

The names are a contract: state dicts of the book's model load into this model, and vice versa. That includes the causal
masks, which the book registers as persistent buffers, so they are part of every file.
"""

from __future__ import annotations

import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NotRequired, TypedDict, cast

import torch
from safetensors.torch import save_file
from torch import nn

__all__ = ["SIZES", "GPTConfig", "GPTModel", "config", "gpt2", "random_state_dict", "random_weight", "write_checkpoint"]


class GPTConfig(TypedDict):
    """The book's configuration keys."""

    #: Size of the vocabulary, in tokens.
    vocab_size: int
    #: Longest sequence, in tokens.
    context_length: int
    #: Width of the residual stream.
    emb_dim: int
    #: Attention heads per block; divides ``emb_dim``.
    n_heads: int
    #: Number of transformer blocks.
    n_layers: int
    #: Dropout probability.
    drop_rate: NotRequired[float]
    #: Whether query, key and value projections have a bias; GPT-2's have.
    qkv_bias: NotRequired[bool]


_SHAPES = {
    "tiny": (64, 4, 2),
    "small": (768, 12, 12),
    "medium": (1024, 16, 24),
    "large": (1280, 20, 36),
    "xl": (1600, 25, 48),
}

#: Names of the sizes, smallest first: a tiny one to test the benchmarks, then 124M, 355M, 774M and 1558M parameters as
#: GPT-2 counts them. The book does not tie the output head to the token embedding, so its models and files are larger
#: by one such matrix.
SIZES = tuple(_SHAPES)


def config(size: str) -> GPTConfig:
    """Return the configuration of one of ``SIZES``.

    Example:
        >>> config("large")["n_layers"]
        36

    Raises:
        ValueError: Unknown size.
    """
    if size not in _SHAPES:
        raise ValueError(f"unknown GPT-2 size {size!r}; expected one of {', '.join(SIZES)}")
    emb_dim, n_heads, n_layers = _SHAPES[size]
    return GPTConfig(
        vocab_size=50257,
        context_length=1024,
        emb_dim=emb_dim,
        n_heads=n_heads,
        n_layers=n_layers,
        drop_rate=0.0,
        qkv_bias=True,
    )


class LayerNorm(nn.Module):
    """Layer normalization with parameters named ``scale`` and ``shift``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.scale, self.shift)


class CausalAttention(nn.Module):
    """Causal multi-head self-attention."""

    mask: torch.Tensor

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        width, context, bias = cfg["emb_dim"], cfg["context_length"], cfg.get("qkv_bias", False)
        self.n_heads = cfg["n_heads"]
        self.W_query = nn.Linear(width, width, bias=bias)
        self.W_key = nn.Linear(width, width, bias=bias)
        self.W_value = nn.Linear(width, width, bias=bias)
        self.out_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(cfg.get("drop_rate", 0.0))
        self.register_buffer("mask", torch.triu(torch.ones(context, context), diagonal=1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        return x.view(batch, tokens, self.n_heads, width // self.n_heads).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[1]
        query, key, value = self._heads(self.W_query(x)), self._heads(self.W_key(x)), self._heads(self.W_value(x))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(self.mask[:tokens, :tokens].bool(), -torch.inf)
        mixed = self.dropout(torch.softmax(scores, dim=-1)) @ value
        return cast("torch.Tensor", self.out_proj(mixed.transpose(1, 2).flatten(-2)))


class FeedForward(nn.Module):
    """Two linear layers with a hidden width of four times the input width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.layers(x))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward with residual connections."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.att = CausalAttention(cfg)
        self.ff = FeedForward(cfg["emb_dim"])
        self.norm1 = LayerNorm(cfg["emb_dim"])
        self.norm2 = LayerNorm(cfg["emb_dim"])
        self.drop_shortcut = nn.Dropout(cfg.get("drop_rate", 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_shortcut(self.att(self.norm1(x)))
        return x + cast("torch.Tensor", self.drop_shortcut(self.ff(self.norm2(x))))


class GPTModel(nn.Module):
    """A GPT-2-shaped language model: maps token ids (batch, tokens) to logits (batch, tokens, vocab_size).

    Example:
        >>> cfg = GPTConfig(vocab_size=11, context_length=8, emb_dim=4, n_heads=2, n_layers=1)
        >>> GPTModel(cfg)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 11])
    """

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.pos_emb = nn.Embedding(cfg["context_length"], cfg["emb_dim"])
        self.drop_emb = nn.Dropout(cfg.get("drop_rate", 0.0))
        self.trf_blocks = nn.Sequential(*(TransformerBlock(cfg) for _ in range(cfg["n_layers"])))
        self.final_norm = LayerNorm(cfg["emb_dim"])
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return next-token logits for every position."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        x = self.drop_emb(self.tok_emb(token_ids) + self.pos_emb(positions))
        return cast("torch.Tensor", self.out_head(self.final_norm(self.trf_blocks(x))))


def gpt2(size: str = "small") -> GPTModel:
    """Return an untrained GPT-2 of a size. Example: ``sluice load FILE --model sluice.benchmark.gpt2:gpt2``."""
    return GPTModel(config(size))


def random_weight(name: str, shape: torch.Size) -> torch.Tensor:
    """Return the fp32 weight of this name, equal on every call: its random numbers are seeded with its name.

    Causal masks are real and norms scale by about one, so that logits are meaningful. Uniform numbers take a tenth of
    the time of a model's own initialization.
    """
    if name.endswith("mask"):
        return torch.triu(torch.ones(shape), diagonal=1)
    middle, spread = (1.0, 0.1) if name.endswith("scale") else (0.0, 0.04)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).uniform_(middle - spread, middle + spread, generator=generator)


def random_state_dict(size: str, dtype: torch.dtype) -> OrderedDict[str, torch.Tensor]:
    """Return a state dict of random weights of a model of ``SIZES``."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in gpt2(size).state_dict().items()}
    # torch fills tensors without the interpreter lock: one tensor per thread.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        weights = pool.map(lambda name: random_weight(name, shapes[name]).to(dtype), shapes)
        return OrderedDict(zip(shapes, weights, strict=True))


def write_checkpoint(state_dict: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a flat state dict of contiguous tensors that share no memory.

    The suffix tells the format: ``.safetensors``; any other one is a ``torch.save`` file; a path without one is a
    directory with a file ``NAME.pt`` per entry.
    """
    if path.suffix == ".safetensors":
        save_file(dict(state_dict), path, metadata={"format": "pt"})  # transformers refuses files without it
    elif path.suffix:
        torch.save(state_dict, path)
    else:
        path.mkdir(parents=True, exist_ok=True)
        for name, tensor in state_dict.items():
            torch.save(tensor, path / f"{name}.pt")
