"""Methods that only these benchmarks run: loaders of whole Hugging Face models, and of CUDA devices alone."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from sluice.benchmark.methods import METHODS, on_meta
from sluice.benchmark.records import HUGGING_FACE, SAFETENSORS, MethodJob, method

__all__ = ["instanttensor_load", "transformers_load"]


@method("transformers", reads=(HUGGING_FACE,), imports=("transformers:AutoModelForCausalLM", "bench._peers"))
def transformers_load(job: MethodJob) -> nn.Module:
    """Let transformers build and fill its own model of the directory's configuration."""
    from transformers import AutoModelForCausalLM

    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=job.torch_dtype)
    return loaded.to(job.device)


@method("instanttensor", build=on_meta, reads=(SAFETENSORS,), imports=("instanttensor:safe_open", "bench._peers"))
def instanttensor_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Cast each tensor as it arrives and assign it; since version 0.2 tensors belong to the caller."""
    open_file = import_module("instanttensor").safe_open
    with open_file(job.checkpoint, framework="pt", device=job.device) as loaded:
        arrived = {name: tensor.to(job.torch_dtype) for name, tensor in loaded.tensors()}
    model.load_state_dict(arrived, assign=True)
    return model


METHODS.update({each.name: each for each in (transformers_load, instanttensor_load)})
