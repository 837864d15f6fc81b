"""Whole models of transformers' names, and the directories of ranks that Megatron writes for them: independent code."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch

LAYERS, HEADS, GROUPS, HEAD, HIDDEN, INNER, VOCABULARY, PADDED = 4, 4, 2, 2, 8, 12, 11, 16

State = dict[str, torch.Tensor]


class Ranks(NamedTuple):
    """Numbers of tensor and pipeline ranks, and of chunks of layers on each stage."""

    tensor: int
    stages: int
    chunks: int = 1


def llama() -> State:
    """Return the weights of a Llama with grouped queries and biases of attention."""
    torch.manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for kind, rows in (("q", HEADS * HEAD), ("k", GROUPS * HEAD), ("v", GROUPS * HEAD)):
            shapes |= {f"{at}self_attn.{kind}_proj.weight": (rows, HIDDEN), f"{at}self_attn.{kind}_proj.bias": (rows,)}
        shapes |= {f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD), f"{at}input_layernorm.weight": (HIDDEN,)}
        shapes |= {f"{at}mlp.{kind}_proj.weight": (INNER, HIDDEN) for kind in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (HIDDEN, INNER), f"{at}post_attention_layernorm.weight": (HIDDEN,)}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def gpt() -> State:
    """Return the weights of a GPT-2."""
    torch.manual_seed(2)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, HIDDEN), "wpe.weight": (6, HIDDEN)}
    for layer in range(LAYERS):
        for name, inner in {"attn.c_attn": 3 * HIDDEN, "attn.c_proj": HIDDEN, "mlp.c_fc": INNER}.items():
            shapes |= {f"h.{layer}.{name}.weight": (HIDDEN, inner), f"h.{layer}.{name}.bias": (inner,)}
        shapes |= {f"h.{layer}.mlp.c_proj.weight": (INNER, HIDDEN), f"h.{layer}.mlp.c_proj.bias": (HIDDEN,)}
        shapes |= {f"h.{layer}.ln_{n}.{kind}": (HIDDEN,) for n in (1, 2) for kind in ("weight", "bias")}
    shapes |= {f"ln_f.{kind}": (HIDDEN,) for kind in ("weight", "bias")}
    return {f"transformer.{name}": torch.randn(shape) for name, shape in shapes.items()}


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    rest = q.shape[1:]
    parts = [part.reshape(groups, -1, *rest) for part in (q, k, v)]
    return torch.cat(parts, 1).reshape(-1, *rest)


def core_of_llama(state: State) -> State:
    """Return a whole Llama under the names of Megatron-core with Transformer Engine."""
    found = {
        "embedding.word_embeddings.weight": _padded(state["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": _padded(state["lm_head.weight"]),
    }
    for layer in range(LAYERS):
        own = {name.split(".", 3)[3]: t for name, t in state.items() if name.startswith(f"model.layers.{layer}.")}
        at = f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            three = [own[f"self_attn.{part}_proj.{kind}"] for part in "qkv"]
            found[f"{at}self_attention.linear_qkv.{kind}"] = _grouped(three[0], three[1], three[2], GROUPS)
        found |= {
            f"{at}self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
            f"{at}self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
            f"{at}mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
            f"{at}mlp.linear_fc1.weight": torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]),
            f"{at}mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
        }
    return found


def older_of_gpt(state: State) -> State:
    """Return a whole GPT-2 under the names of Megatron-LM."""
    state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    found = {
        "language_model.embedding.word_embeddings.weight": _padded(state["wte.weight"]),
        "language_model.embedding.position_embeddings.weight": state["wpe.weight"],
        **{f"language_model.encoder.final_layernorm.{kind}": state[f"ln_f.{kind}"] for kind in ("weight", "bias")},
    }
    for layer in range(LAYERS):
        at, own = f"language_model.encoder.layers.{layer}.", f"h.{layer}."
        for kind in ("weight", "bias"):
            q, k, v = state[f"{own}attn.c_attn.{kind}"].t().chunk(3)
            found[f"{at}self_attention.query_key_value.{kind}"] = _grouped(q, k, v, HEADS)
            found[f"{at}self_attention.dense.{kind}"] = state[f"{own}attn.c_proj.{kind}"].t()
            found[f"{at}mlp.dense_h_to_4h.{kind}"] = state[f"{own}mlp.c_fc.{kind}"].t()
            found[f"{at}mlp.dense_4h_to_h.{kind}"] = state[f"{own}mlp.c_proj.{kind}"].t()
            found[f"{at}input_layernorm.{kind}"] = state[f"{own}ln_1.{kind}"]
            found[f"{at}post_attention_layernorm.{kind}"] = state[f"{own}ln_2.{kind}"]
    return found


def _padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, torch.full((PADDED - len(rows), rows.shape[1]), 7.0)])


def _slice(name: str, tensor: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    short = name.rpartition("layers.")[2]
    if "norm" in short or "position" in short:
        return tensor
    if short.endswith(("linear_proj.weight", "linear_fc2.weight", "dense.weight", "dense_4h_to_h.weight")):
        return tensor.chunk(count, 1)[rank].clone()
    if short.endswith(("dense.bias", "dense_4h_to_h.bias")):
        return tensor
    if short.endswith("linear_fc1.weight"):  # with a gate
        return torch.cat([half.chunk(count)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(count)[rank].clone()


def _stage(state: State, stage: int, chunk: int, ranks: Ranks) -> State:
    """Return the part of a chunk of layers, numbered from 0."""
    each = LAYERS // (ranks.stages * ranks.chunks)
    first = (chunk * ranks.stages + stage) * each
    at_end = (stage, chunk) == (ranks.stages - 1, ranks.chunks - 1)
    found = {}
    for name, tensor in state.items():
        before, inside, after = name.partition(".layers.")
        if inside:
            number, _, rest = after.partition(".")
            if first <= int(number) < first + each:
                found[f"{before}.layers.{int(number) - first}.{rest}"] = tensor
        elif at_end if "final" in name or "output" in name else (stage, chunk) == (0, 0):
            found[name] = tensor
    return found


def write(directory: Path, state: State, ranks: Ranks, *, nemo: bool = False) -> Path:
    """Write a directory for each rank, with a part of the whole model in Megatron's names; return the directory."""
    for rank in range(ranks.tensor):
        for stage in range(ranks.stages):
            own = directory / (f"mp_rank_{rank:02}" + (f"_{stage:03}" if ranks.stages > 1 else ""))
            if nemo:
                own = directory / f"tp_rank_{rank:02}_pp_rank_{stage:03}"
            own.mkdir(parents=True)
            parts = []
            for chunk in range(ranks.chunks):
                part = _stage(state, stage, chunk, ranks)
                parts.append({name: _slice(name, tensor, rank, ranks.tensor) for name, tensor in part.items()})
                parts[-1]["decoder.layers.0.self_attention.core_attention._extra_state"] = torch.zeros(3)
            if nemo:
                torch.save({f"model.{name}": tensor for name, tensor in parts[0].items()}, own / "model_weights.ckpt")
                continue
            models: dict[str, Any] = {"model": parts[0]}
            if ranks.chunks > 1:
                models = {f"model{chunk}": part for chunk, part in enumerate(parts)}
            rest = {"args": argparse.Namespace(hidden_size=8), "iteration": 7, "checkpoint_version": 3.0}
            optimizer = {"optimizer": {"state": {0: {"exp_avg": torch.ones(5)}}}}
            torch.save({**rest, **models, **optimizer}, own / "model_optim_rng.pt")
    return directory
