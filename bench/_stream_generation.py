"""Tokens per second of a GPT-2 of transformers that is streamed, by batch: ``bench.stream --generate``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import sluice
from sluice._units import format_bytes
from sluice.benchmark.gpt2 import config, random_weight, write_checkpoint
from sluice.benchmark.records import Outcome, Work

__all__ = ["BATCHES", "HEADINGS", "rows", "work", "write"]

BATCHES = (1, 4, 16, 64)

HEADINGS = ("sequences", "tokens per s", "s per step", "read per step", "tokens per s in memory", "same tokens")

#: Tokens of a prompt, and tokens that follow it, each from one step.
_PROMPT, _STEPS = 16, 8


def _empty(size: str) -> Any:
    import transformers  # as in the models of bench.stream

    shape = config(size)
    sizes = {"n_embd": shape["emb_dim"], "n_layer": shape["n_layers"], "n_head": shape["n_heads"]}
    with sluice.empty_init():
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()


def write(size: str, folder: Path) -> tuple[Path, int]:
    """Write random weights of a model; return the file, and the bytes of the weights."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in _empty(size).named_parameters()}
    state = {name: random_weight(name, shape) for name, shape in shapes.items()}
    write_checkpoint(state, folder / "generation.safetensors")
    return folder / "generation.safetensors", sum(tensor.nbytes for tensor in state.values())


def work(size: str, path: str, memory: int | None, batches: Sequence[int]) -> Work:
    """Generate tokens for each batch, streamed or, without ``memory``, loaded."""
    yield
    model = _empty(size)
    yield
    stream = None if memory is None else sluice.stream(model, path, memory=memory)
    if stream is None:
        sluice.load_into(model, path)
    found = []
    for batch in (batches[0], *batches):  # the first one is not counted
        ids = (torch.arange(batch * _PROMPT) * 977 % 50_000).reshape(batch, _PROMPT)
        before, begin = 0 if stream is None else stream.report.read_bytes, time.perf_counter()
        tokens = model.generate(ids, do_sample=False, min_new_tokens=_STEPS, max_new_tokens=_STEPS, pad_token_id=0)
        seconds = time.perf_counter() - begin
        read = 0 if stream is None else stream.report.read_bytes - before
        found.append({"seconds": seconds, "read": read, "tokens": tokens[:, _PROMPT:].tolist()})
    yield
    return {"batches": found[1:]}


def rows(streamed: Outcome, loaded: Outcome) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each batch."""
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]]
    pairs = list(zip(streamed.facts["batches"], loaded.facts["batches"], strict=True))
    for batch, (own, other) in zip(BATCHES, pairs, strict=True):
        yield (
            str(batch),
            f"{batch * _STEPS / own['seconds']:.1f}",
            f"{own['seconds'] / _STEPS:.2f}",
            format_bytes(own["read"] // _STEPS),
            f"{batch * _STEPS / other['seconds']:.1f}",
            "yes" if own["tokens"] == other["tokens"] else "NO",
        )
