"""Checkpoint directories in the layouts of their libraries, and checks of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import sluice
from support.oracles import bits

Tensors = dict[str, torch.Tensor]

SAFETENSORS_INDEX = "model.safetensors.index.json"


def tensors(*names: str) -> Tensors:
    return {name: torch.arange(12.0).reshape(3, 4) + 100 * number for number, name in enumerate(names)}


def write_texts(root: Path, files: Mapping[str, str]) -> Path:
    """Write files below a directory; return it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def save(path: Path, content: Any) -> None:
    """Write a file in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path, metadata={"format": "pt"})
    else:
        torch.save(content, path)


def read_with_their_library(path: Path) -> Tensors:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return dict(torch.load(path, weights_only=True))


def write_index(path: Path, shards: Mapping[str, Iterable[str]], **metadata: object) -> Path:
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2))
    return path


def save_sharded(directory: Path, index: str, shards: Mapping[str, Tensors]) -> Path:
    """Write shards and their index; return the index."""
    for name, content in shards.items():
        save(directory / name, content)
    total = sum(tensor.nbytes for content in shards.values() for tensor in content.values())
    return write_index(directory / index, shards, total_size=total)


def two_shards(directory: Path, suffix: str = ".safetensors") -> tuple[Path, Path]:
    """Write a small sharded model; return its shards."""
    stem = {".safetensors": "model", ".bin": "pytorch_model"}[suffix]
    names = (f"{stem}-00001-of-00002{suffix}", f"{stem}-00002-of-00002{suffix}")
    shards = dict(zip(names, (tensors("a.w", "a.b"), tensors("c", "b.w")), strict=True))
    save_sharded(directory, f"{stem}{suffix}.index.json", shards)
    return directory / names[0], directory / names[1]


# Each of these writes tensors into a directory and returns the path to open


def write_zip(path: Path, content: Tensors) -> Path:
    torch.save(content, path / "f.pth")
    return path / "f.pth"


def write_legacy(path: Path, content: Tensors) -> Path:
    torch.save(content, path / "f.pth", _use_new_zipfile_serialization=False)
    return path / "f.pth"


def write_safetensors(path: Path, content: Tensors) -> Path:
    safetensors.torch.save_file(content, path / "f.safetensors")
    return path / "f.safetensors"


def write_model(path: Path, content: Tensors) -> Path:
    safetensors.torch.save_file(content, path / "model.safetensors")
    return path


def write_parts(path: Path, content: Tensors) -> Path:
    for number, (name, tensor) in enumerate(content.items()):
        safetensors.torch.save_file({name: tensor}, path / f"part-{number}.safetensors")
    return path


def write_parameters(path: Path, content: Tensors) -> Path:
    path.mkdir(exist_ok=True)
    for name, tensor in content.items():
        torch.save(tensor.clone(), path / f"{name}.pt")
    return path


def write_shards(path: Path, content: Tensors) -> Path:
    shards = {f"model-{number}.safetensors": {name: tensor} for number, (name, tensor) in enumerate(content.items())}
    return save_sharded(path, SAFETENSORS_INDEX, shards)


def write_pickled_shards(path: Path, content: Tensors) -> Path:
    shards = {f"pytorch_model-{number}.bin": {name: tensor} for number, (name, tensor) in enumerate(content.items())}
    return save_sharded(path, "pytorch_model.bin.index.json", shards).parent


def write_peft(path: Path, content: Tensors, **config: Any) -> Path:
    """Write an adapter as peft does; ``config`` replaces settings."""
    path.mkdir()
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in content.items()}
    safetensors.torch.save_file(named, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "init_lora_weights": True} | config
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def assert_same(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name  # NaN too


def forms(shard_bytes: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of a save in each form, by the name that it is saved under."""
    return {"model.pth": {}, "model.safetensors": {}, "whole": {}, "sharded": {"max_shard_size": shard_bytes}}


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of a file, or of each file below a directory."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


def notes(source: Path) -> str:
    with sluice.open(source) as checkpoint:
        return "\n".join(checkpoint.index.notes)


def chosen(directory: Path) -> list[str]:
    with sluice.open(directory) as checkpoint:
        return [os.path.relpath(file, directory) for file in checkpoint.files]


def refusal(
    source: Any,
    kind: type[sluice.SluiceError] = sluice.SluiceError,
    problem: str = "",
    *,
    limits: sluice.Limits | None = None,
) -> sluice.SluiceError:
    """Return the error of this kind, with a problem that has these words, with which a checkpoint is refused."""
    with pytest.raises(kind) as caught:
        sluice.open(source, limits=limits)
    assert problem in caught.value.problem
    return caught.value
