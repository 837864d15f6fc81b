"""The tutorial's loading methods, and sluice's, as named strategies in full and half precision.

Every strategy starts from the fp32 checkpoint and is timed from the construction of the model, as in the tutorial's
cells. The tutorial has no half-precision cells: each variant calls ``.to(torch.bfloat16)`` where a user of that method
would.

One difference from the tutorial: after ``to_empty`` its cells fill ``named_parameters()`` only, so the causal masks,
which are buffers, stay uninitialized and the logits are wrong. Here the loops run over ``state_dict()``, which takes no
more memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from sluice.benchmark.records import OTHER, PARAMETERS, PTH, SAFETENSORS, SHARDS, MethodJob, method
from sluice.benchmark.subjects import build, read_state_dict

__all__ = ["STRATEGIES"]

_TORCH_OR_SAFETENSORS = (PTH, SAFETENSORS, SHARDS)


def _empty_model(job: MethodJob) -> nn.Module:
    with torch.device("meta"):
        model = build(job)
    return model.to(job.torch_dtype).to_empty(device=job.device)


def _copy_one_by_one(model: nn.Module, state_dict: dict[str, torch.Tensor], device: str) -> None:
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.copy_(state_dict[name].to(device))


@method("naive", reads=_TORCH_OR_SAFETENSORS, takes_key=True)
def naive(job: MethodJob) -> nn.Module:
    """Build the model on the device, load the whole state dict onto the same device, copy."""
    model = build(job).to(job.device, job.torch_dtype)
    model.load_state_dict(read_state_dict(Path(job.checkpoint), job.key, device=job.device))
    return model


@method("sequential", reads=_TORCH_OR_SAFETENSORS, takes_key=True)
def sequential(job: MethodJob) -> nn.Module:
    """Build the model on the device, load the state dict into host memory, copy parameter by parameter."""
    model = build(job).to(job.device, job.torch_dtype)
    _copy_one_by_one(model, read_state_dict(Path(job.checkpoint), job.key, device="cpu"), job.device)
    return model


@method("meta-sequential", reads=_TORCH_OR_SAFETENSORS, takes_key=True)
def meta_sequential(job: MethodJob) -> nn.Module:
    """Allocate the model without initializing it, load the state dict onto the device, copy one by one."""
    model = _empty_model(job)
    _copy_one_by_one(model, read_state_dict(Path(job.checkpoint), job.key, device=job.device), job.device)
    return model


@method("mmap", reads=_TORCH_OR_SAFETENSORS, takes_key=True)
def mapped(job: MethodJob) -> nn.Module:
    """Map the file and assign its tensors to a meta model: the tutorial's best practice."""
    with torch.device("meta"):
        model = build(job)
    state_dict = read_state_dict(Path(job.checkpoint), job.key, device=job.device, mapped=True)
    model.load_state_dict(state_dict, assign=True)
    del state_dict  # as in the tutorial, which does not name it: a reference would keep the fp32 weights alive
    return model.to(job.torch_dtype)


@method("per-parameter", reads=(PARAMETERS,))
def per_parameter(job: MethodJob) -> nn.Module:
    """Allocate the model without initializing it, load one small file after the other."""
    model = _empty_model(job)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            file = Path(job.checkpoint, f"{name}.pt")
            weight.copy_(torch.load(file, map_location="cpu", weights_only=True))
    return model


@method(
    "sluice",
    reads=(*_TORCH_OR_SAFETENSORS, PARAMETERS, OTHER),
    imports=("sluice:empty_init", "sluice:load_into"),
    takes_key=True,
)
def with_sluice(job: MethodJob) -> nn.Module:
    """Build the model without memory and fill it with sluice from the ordinary file."""
    import sluice

    with sluice.empty_init():
        model = build(job)
    sluice.load_into(model, job.checkpoint, device=job.device, dtype=job.torch_dtype, key=job.key)
    return model


#: In the order of the tutorial.
STRATEGIES = (naive, sequential, meta_sequential, mapped, per_parameter, with_sluice)
