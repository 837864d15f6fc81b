"""The models of ``bench.stream``: GPT-2 of each size, one whose blocks have experts, and a Llama of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from bench._llama import LLAMA_1B, write_directory
from sluice.benchmark.gpt2 import SIZES, GPTModel, config, gpt2, random_weight, write_checkpoint

__all__ = ["EXPERTS", "LLAMA", "MODELS", "empty_state", "file_dtype", "model_of", "write_model"]

#: Name of the mixture of experts, which has the width and the blocks of GPT-2 small.
EXPERTS = "experts"

#: Name of a Llama of transformers with 1.1 billion parameters, in bf16.
LLAMA = "llama"

#: Names of the models.
MODELS = (*SIZES, EXPERTS, LLAMA)

#: Experts of each block, and those that a token is sent to.
_COUNT, _CHOSEN = 8, 2


class _Experts(nn.Module):
    """Feed-forward networks of which each token uses two, weighted by a router, as in Mixtral."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, _COUNT, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(_COUNT)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(_CHOSEN)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                result[token] += weights[token, place, None] * expert(tokens[token])
        return result.reshape(x.shape)


def model_of(name: str) -> nn.Module:
    """Build a model."""
    if name == LLAMA:
        import transformers  # the other models do without it

        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_1B, use_cache=False))  # type: ignore[no-any-return]
    if name != EXPERTS:
        return gpt2(name)
    cfg = config("small")
    model = GPTModel(cfg)
    for block in model.trf_blocks:
        block.ff = _Experts(cfg["emb_dim"])
    return model


def empty_state(name: str) -> dict[str, torch.Tensor]:
    """Return the state dict of a model without memory."""
    with torch.device("meta"):
        return model_of(name).state_dict()


def file_dtype(name: str) -> str:
    """Return the dtype of the checkpoint of a model."""
    return "bfloat16" if name == LLAMA else "float32"


def write_model(name: str, folder: Path, file: str) -> Path:
    """Write random weights of a model, and return the file; a Llama has a Hugging Face directory around it."""
    if name == LLAMA:
        write_directory(folder / LLAMA, LLAMA_1B, shards=1)
        return folder / LLAMA / "model.safetensors"
    path = folder / file
    state = {key: random_weight(key, tensor.shape) for key, tensor in empty_state(name).items()}
    write_checkpoint(state, path)
    return path
