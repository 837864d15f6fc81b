"""The methods of a comparison by name: those of the tutorial, two other loaders, and the reference.

Every method of the tutorial starts from the fp32 checkpoint and is timed from the construction of the model, as in the
tutorial's cells. The tutorial has no half-precision cells: each variant calls ``.to(torch.bfloat16)`` where a user of
that method would. One difference: after ``to_empty`` its cells fill ``named_parameters()`` only, so the causal masks,
which are buffers, stay uninitialized. Here the loops run over ``state_dict()``, which takes no more memory.

For other loaders the model is built on the meta device before the clock starts, so that none pays for random numbers.
Those that copy into a real model get one whose memory is allocated but not initialized, which is in their favor.

The model is a built-in GPT-2 or a user's. State dicts are read with torch and safetensors, so that sluice is compared
with independent code.
"""

from __future__ import annotations

import json
import pkgutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sluice
from sluice.benchmark import gpt2
from sluice.benchmark.records import (
    OTHER,
    PARAMETERS,
    PTH,
    REFERENCE,
    SAFETENSORS,
    SHARDS,
    SHORT_DTYPES,
    Kind,
    Method,
    MethodJob,
    ModelSource,
    Precision,
    method,
)

__all__ = [
    "FILES",
    "LOADERS",
    "METHODS",
    "PEERS",
    "SLUICE",
    "STRATEGIES",
    "absence",
    "allocated",
    "assigned",
    "build",
    "filled",
    "final_bytes",
    "is_builtin",
    "kind_of",
    "main_dtype",
    "on_meta",
    "read_state_dict",
    "truth",
    "without_memory",
]


def is_builtin(model: str) -> bool:
    """Return whether ``model`` is a built-in name and not ``package.module:name``."""
    return ":" not in model


def build(source: ModelSource) -> nn.Module:
    """Build a model."""
    if is_builtin(source.model):
        return gpt2.gpt2(source.model)
    arguments, make = json.loads(source.model_args), pkgutil.resolve_name(source.model)
    built: nn.Module = make(*arguments) if isinstance(arguments, list) else make(**arguments)
    return built


def final_bytes(model: str, dtype: torch.dtype, model_args: str = "{}") -> int:
    """Return F of a model in bytes: parameters and persistent buffers, floating-point ones in this dtype."""
    with sluice.empty_init():
        built = build(ModelSource(model=model, model_args=model_args))
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


def main_dtype(path: Path) -> Precision:
    """Return the dtype of those compared that has the most bytes in a checkpoint; float32 if it has none."""
    nbytes: Counter[str] = Counter()
    with sluice.open(path) as checkpoint:
        for entry in checkpoint.entries.values():
            nbytes[entry.dtype] += entry.nbytes
    return max(SHORT_DTYPES, key=nbytes.__getitem__)


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


#: Kinds of checkpoints that torch or safetensors reads.
FILES = (PTH, SAFETENSORS, SHARDS)

#: Imports of sluice's methods.
SLUICE = ("sluice:empty_init", "sluice:load_into")


def on_meta(job: MethodJob) -> nn.Module:
    """Build the model of a job on the meta device."""
    with torch.device("meta"):
        return build(job)


def without_memory(job: MethodJob) -> nn.Module:
    """Build the model of a job inside of ``empty_init``."""
    with sluice.empty_init():
        return build(job)


def _emptied_by_accelerate(job: MethodJob) -> nn.Module:
    from accelerate import init_empty_weights

    with init_empty_weights():
        return build(job)


def allocated(model: nn.Module, job: MethodJob) -> nn.Module:
    """Give a model on meta memory without contents."""
    return model.to(job.torch_dtype).to_empty(device=job.device)


def _state_dict(job: MethodJob, *, device: str | None = None, mapped: bool = False) -> dict[str, torch.Tensor]:
    return read_state_dict(Path(job.checkpoint), job.key, device=device or job.device, mapped=mapped)


def _copied(model: nn.Module, state_dict: dict[str, torch.Tensor], device: str) -> nn.Module:
    """Copy a state dict into the model, one tensor after the other."""
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.copy_(state_dict[name].to(device))
    return model


def assigned(job: MethodJob, model: nn.Module, *, mapped: bool = False) -> nn.Module:
    """Assign the tensors of the file to the model, and cast the model."""
    state_dict = _state_dict(job, mapped=mapped)
    model.load_state_dict(state_dict, assign=True)
    del state_dict  # as in the tutorial, which does not name it: a reference would keep the fp32 weights alive
    return model.to(job.torch_dtype)


@method("naive", reads=FILES, takes_key=True)
def _naive(job: MethodJob) -> nn.Module:
    """Build the model on the device, load the whole state dict onto the same device, copy."""
    model = build(job).to(job.device, job.torch_dtype)
    model.load_state_dict(_state_dict(job))
    return model


@method("sequential", reads=FILES, takes_key=True)
def _sequential(job: MethodJob) -> nn.Module:
    """Build the model on the device, load the state dict into host memory, copy parameter by parameter."""
    return _copied(build(job).to(job.device, job.torch_dtype), _state_dict(job, device="cpu"), job.device)


@method("meta-sequential", reads=FILES, takes_key=True)
def _meta_sequential(job: MethodJob) -> nn.Module:
    """Allocate the model without initializing it, load the state dict onto the device, copy one by one."""
    return _copied(allocated(on_meta(job), job), _state_dict(job), job.device)


@method("mmap", reads=FILES, takes_key=True)
def _mapped(job: MethodJob) -> nn.Module:
    """Map the file and assign its tensors to a meta model: the tutorial's best practice."""
    return assigned(job, on_meta(job), mapped=True)


@method("per-parameter", reads=(PARAMETERS,))
def _per_parameter(job: MethodJob) -> nn.Module:
    """Allocate the model without initializing it, load one small file after the other."""
    model = allocated(on_meta(job), job)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            file = Path(job.checkpoint, f"{name}.pt")
            weight.copy_(torch.load(file, map_location="cpu", weights_only=True))
    return model


@method("sluice", reads=(*FILES, PARAMETERS, OTHER), imports=SLUICE, takes_key=True)
def _sluice(job: MethodJob) -> nn.Module:
    """Build the model without memory and fill it with sluice from the ordinary file."""
    return filled(job, without_memory(job))


def filled(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill a model with sluice."""
    sluice.load_into(model, job.checkpoint, device=job.device, dtype=job.torch_dtype, key=job.key)
    return model


@method("safetensors-load-file", build=on_meta, reads=(SAFETENSORS, SHARDS))
def _safetensors_load_file(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the tensors, which are views of the mapped file, assign them to the model, and cast the model."""
    return assigned(job, model)


@method("accelerate", build=_emptied_by_accelerate, reads=FILES, imports=("accelerate:load_checkpoint_in_model",))
def _accelerate(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model; without a device map accelerate ignores the dtype."""
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(model, job.checkpoint, device_map={"": job.device}, dtype=job.torch_dtype)
    return model


@method(REFERENCE, build=without_memory, reads=(*FILES, PARAMETERS), takes_key=True)
def _reference(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill the model with the random numbers of the checkpoint; another model with what torch or safetensors reads."""
    if not is_builtin(job.model):
        return truth(job, model)
    model.load_state_dict(gpt2.random_state_dict(job.model, job.torch_dtype), assign=True)
    return model.to(job.device)


#: The tutorial's methods in its order, and sluice.
STRATEGIES = (_naive, _sequential, _meta_sequential, _mapped, _per_parameter, _sluice)

#: Other loaders, in the order of the tables.
PEERS = (_safetensors_load_file, _accelerate)

#: Methods that load a model, by name.
LOADERS: dict[str, Method] = {each.name: each for each in (*STRATEGIES, *PEERS)}

#: All methods that a benchmark process can run, by name. Other modules may add methods.
METHODS: dict[str, Method] = {**LOADERS, REFERENCE: _reference}


def absence(name: str) -> str:
    """Return the missing package of a method and how to install it, without imports; empty if all are installed."""
    packages = (each.partition(":")[0].partition(".")[0] for each in METHODS[name].imports)
    missing = next((package for package in packages if find_spec(package) is None), "")
    return f"{missing} is not installed: pip install {missing}" if missing else ""
