"""Models and state dicts of a comparison: a built-in GPT-2 or a user's model.

State dicts are read with torch and safetensors, so that sluice is compared with independent code.
"""

from __future__ import annotations

import json
import pkgutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sluice
from sluice._dtypes import is_castable
from sluice.benchmark import gpt2
from sluice.benchmark.records import OTHER, PARAMETERS, PTH, SAFETENSORS, SHARDS, Kind, MethodJob

__all__ = ["build", "final_bytes", "is_builtin", "kind_of", "main_dtype", "read_state_dict", "truth"]


def is_builtin(model: str) -> bool:
    """Return whether ``model`` is a built-in name and not ``package.module:name``."""
    return ":" not in model


def build(job: MethodJob) -> nn.Module:
    """Build the model of a job."""
    return _build(job.model, job.model_args)


def _build(model: str, model_args: str) -> nn.Module:
    if is_builtin(model):
        return gpt2.gpt2(model)
    arguments, make = json.loads(model_args), pkgutil.resolve_name(model)
    built: nn.Module = make(*arguments) if isinstance(arguments, list) else make(**arguments)
    return built


def final_bytes(model: str, dtype: torch.dtype, model_args: str = "{}") -> int:
    """Return F of a model in bytes: parameters and persistent buffers, floating-point ones in this dtype."""
    with sluice.empty_init():
        built = _build(model, model_args)
    tensors = {id(tensor): tensor for tensor in built.state_dict(keep_vars=True).values()}
    return sum(
        tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize for tensor in tensors.values()
    )


def kind_of(path: Path) -> Kind:
    """Return the kind of a checkpoint.

    Raises:
        CheckpointError: sluice does not recognize the checkpoint.
    """
    with sluice.open(path) as checkpoint:
        files, name = checkpoint.files, checkpoint.format
    if path.is_file() and len(files) == 1:
        return SAFETENSORS if name == "safetensors" else PTH
    endings = {Path(file).suffix for file in files}
    if path.is_dir() and endings == {".pt"}:
        return PARAMETERS
    return SHARDS if path.is_dir() and endings <= {".safetensors", ".bin"} else OTHER


def main_dtype(path: Path) -> str:
    """Return the floating-point dtype with the most bytes in a checkpoint; float32 if it has none."""
    nbytes: Counter[str] = Counter()
    with sluice.open(path) as checkpoint:
        for entry in checkpoint.entries.values():
            nbytes[entry.dtype] += entry.nbytes
    return next((dtype for dtype, _ in nbytes.most_common() if is_castable(dtype)), "float32")


def read_state_dict(checkpoint: Path, key: str | None, *, device: str, mapped: bool = False) -> dict[str, torch.Tensor]:
    """Return the whole state dict of a checkpoint, read by torch or safetensors.

    Args:
        checkpoint: A file or a directory, whose files sluice names.
        key: Dotted path of the weights; None for the whole checkpoint.
        device: Device of the tensors.
        mapped: Whether to map files instead of reading them; safetensors always does.
    """
    files = [checkpoint]
    if checkpoint.is_dir():
        with sluice.open(checkpoint) as opened:
            files = list(map(Path, opened.files))
    state_dict: dict[str, Any] = {}
    for file in files:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(file, device=device)
        else:
            content = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
        state_dict.update({file.stem: content} if isinstance(content, torch.Tensor) else content)
    for part in filter(None, (key or "").split(".")):
        state_dict = state_dict[part]
    return state_dict


def truth(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill a meta model name by name with the values that torch or safetensors reads; one name of a tie is enough."""
    named = model.state_dict(keep_vars=True)
    names_by_tensor: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names_by_tensor.setdefault(id(tensor), []).append(name)
    partners = {name: names_by_tensor[id(tensor)] for name, tensor in named.items()}
    model = model.to(job.torch_dtype).to_empty(device="cpu")
    state_dict = read_state_dict(Path(job.checkpoint), job.key, device="cpu", mapped=True)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.copy_(next(state_dict[partner] for partner in partners[name] if partner in state_dict))
    return model
