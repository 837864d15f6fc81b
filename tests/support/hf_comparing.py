"""Comparison of two loads of one model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

import sluice
from sluice.quantizing.inner_tensors import inner_tensors
from support.directories import save_sharded
from support.oracles import bits


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare two models: tensor names, dtypes, bits, ties and flags; settings; mode."""
    assert type(ours) is type(theirs)
    for kind in ("named_parameters", "named_buffers"):
        mine, other = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (ours, theirs))
        assert list(mine) == list(other)
        for name, tensor in mine.items():
            assert_same_tensor(name, tensor, other[name])
        assert _ties(mine) == _ties(other)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert not any(module.training for module in ours.modules())
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.all_tied_weights_keys == theirs.all_tied_weights_keys
    if ours.can_generate():
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def assert_same_tensor(name: str, mine: torch.Tensor, other: torch.Tensor) -> None:
    assert (mine.dtype, mine.shape, mine.requires_grad) == (other.dtype, other.shape, other.requires_grad), name
    assert type(mine) is type(other), name
    assert type(mine.data) is type(other.data), name
    for part, expected in zip(inner_tensors(mine), inner_tensors(other), strict=True):
        assert bits(part) == bits(expected), name


def assert_same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Compare the tensors of two models."""
    mine, other = (model.state_dict(keep_vars=True) for model in (ours, theirs))
    assert list(mine) == list(other)
    for name, tensor in mine.items():
        assert_same_tensor(name, tensor, other[name])


def _ties(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    names = defaultdict(list)
    for name, tensor in tensors.items():
        names[id(tensor)].append(name)
    return sorted(group for group in names.values() if len(group) > 1)


def outputs(model: Any, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | str:
    """Return every tensor of a forward pass, or the message of its error."""
    dtype = next(tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
    cast = {name: one.to(dtype) if one.is_floating_point() else one for name, one in inputs.items()}
    try:
        with torch.no_grad():
            leaves = tree_leaves(model(**cast))
    except RuntimeError as error:  # some architectures have no bfloat16 forward pass of their own
        return str(error)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def save_bin(model: Any, saved: Path, directory: Path, *, shards: int) -> None:
    """Write the pickled form of a directory of ``save_pretrained``, with both names of tied weights."""
    directory.mkdir()
    for file in saved.glob("*.json"):
        if not file.name.endswith(".index.json"):
            (directory / file.name).write_bytes(file.read_bytes())
    state = {name: tensor for file in saved.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for target, source in model.all_tied_weights_keys.items():
        if source in state:
            state[target] = state[source]
    if shards == 1:
        torch.save(state, directory / "pytorch_model.bin")
        return
    parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for i, name in enumerate(sorted(state)):
        parts[f"pytorch_model-{i % shards + 1:05}-of-{shards:05}.bin"][name] = state[name]
    save_sharded(directory, "pytorch_model.bin.index.json", parts)


def save_llama(transformers: Any, path: Path, **settings: Any) -> None:
    """Write a small model of linear layers with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **settings)).save_pretrained(path)


def edit_config(path: Path, **values: Any) -> None:
    """Change values of the configuration of a saved model."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, **values}), encoding="utf-8")


def loaded_both_ways(transformers: Any, path: Path, **arguments: Any) -> tuple[Any, Any]:
    """Return the models that sluice and the library load."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained
    return sluice.hf.from_pretrained(path, **arguments), theirs(path, **arguments)
