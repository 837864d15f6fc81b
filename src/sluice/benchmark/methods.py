"""The methods of a comparison by name: those of the tutorial, other loaders, raw reads, and the reference.

Every method of the tutorial starts from the fp32 checkpoint and is timed from the construction of the model, as in the
tutorial's cells. The tutorial has no half-precision cells: each variant calls ``.to(torch.bfloat16)`` where a user of
that method would. One difference: after ``to_empty`` its cells fill ``named_parameters()`` only, so the causal masks,
which are buffers, stay uninitialized. Here the loops run over ``state_dict()``, which takes no more memory.

For other loaders the model is built on the meta device before the clock starts, so that none pays for random numbers.
Those that copy into a real model get one whose memory is allocated but not initialized, which is in their favor.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import sluice
from sluice.benchmark.gpt2 import random_weight
from sluice.benchmark.raw import read_file
from sluice.benchmark.records import (
    OTHER,
    PARAMETERS,
    PTH,
    REFERENCE,
    SAFETENSORS,
    SHARDS,
    Loaded,
    Method,
    MethodJob,
    method,
)
from sluice.benchmark.subjects import build, is_builtin, read_state_dict, truth

__all__ = ["LOADERS", "METHODS", "PEERS", "STRATEGIES", "absence", "on_meta"]

_FILES = (PTH, SAFETENSORS, SHARDS)
_SLUICE = ("sluice:empty_init", "sluice:load_into")


def on_meta(job: MethodJob) -> nn.Module:
    """Build the model of a job on the meta device."""
    with torch.device("meta"):
        return build(job)


def _without_memory(job: MethodJob) -> nn.Module:
    with sluice.empty_init():
        return build(job)


def _emptied_by_accelerate(job: MethodJob) -> nn.Module:
    from accelerate import init_empty_weights

    with init_empty_weights():
        return build(job)


def _allocated(model: nn.Module, job: MethodJob) -> nn.Module:
    return model.to(job.torch_dtype).to_empty(device=job.device)


def _state_dict(job: MethodJob, *, device: str | None = None, mapped: bool = False) -> dict[str, torch.Tensor]:
    return read_state_dict(Path(job.checkpoint), job.key, device=device or job.device, mapped=mapped)


def _copied(model: nn.Module, state_dict: dict[str, torch.Tensor], device: str) -> nn.Module:
    """Copy a state dict into the model, one tensor after the other."""
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.copy_(state_dict[name].to(device))
    return model


def _assigned(job: MethodJob, model: nn.Module, *, mapped: bool = False) -> nn.Module:
    """Assign the tensors of the file to the model, and cast the model."""
    state_dict = _state_dict(job, mapped=mapped)
    model.load_state_dict(state_dict, assign=True)
    del state_dict  # as in the tutorial, which does not name it: a reference would keep the fp32 weights alive
    return model.to(job.torch_dtype)


@method("naive", reads=_FILES, takes_key=True)
def _naive(job: MethodJob) -> nn.Module:
    """Build the model on the device, load the whole state dict onto the same device, copy."""
    model = build(job).to(job.device, job.torch_dtype)
    model.load_state_dict(_state_dict(job))
    return model


@method("sequential", reads=_FILES, takes_key=True)
def _sequential(job: MethodJob) -> nn.Module:
    """Build the model on the device, load the state dict into host memory, copy parameter by parameter."""
    return _copied(build(job).to(job.device, job.torch_dtype), _state_dict(job, device="cpu"), job.device)


@method("meta-sequential", reads=_FILES, takes_key=True)
def _meta_sequential(job: MethodJob) -> nn.Module:
    """Allocate the model without initializing it, load the state dict onto the device, copy one by one."""
    return _copied(_allocated(on_meta(job), job), _state_dict(job), job.device)


@method("mmap", reads=_FILES, takes_key=True)
def _mapped(job: MethodJob) -> nn.Module:
    """Map the file and assign its tensors to a meta model: the tutorial's best practice."""
    return _assigned(job, on_meta(job), mapped=True)


@method("per-parameter", reads=(PARAMETERS,))
def _per_parameter(job: MethodJob) -> nn.Module:
    """Allocate the model without initializing it, load one small file after the other."""
    model = _allocated(on_meta(job), job)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            file = Path(job.checkpoint, f"{name}.pt")
            weight.copy_(torch.load(file, map_location="cpu", weights_only=True))
    return model


@method("sluice", reads=(*_FILES, PARAMETERS, OTHER), imports=_SLUICE, takes_key=True)
def _sluice(job: MethodJob) -> nn.Module:
    """Build the model without memory and fill it with sluice from the ordinary file."""
    return _filled(job, _without_memory(job))


def _filled(job: MethodJob, model: nn.Module) -> nn.Module:
    sluice.load_into(model, job.checkpoint, device=job.device, dtype=job.torch_dtype, key=job.key)
    return model


@method("torch-load", build=on_meta, reads=(PTH,), takes_key=True)
def _torch_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the whole state dict and copy it into the model."""
    model = _allocated(model, job)
    model.load_state_dict(_state_dict(job))
    return model


@method("torch-mmap", build=on_meta, reads=(PTH,), takes_key=True)
def _torch_mmap(job: MethodJob, model: nn.Module) -> nn.Module:
    """Map the file, assign its tensors to the model, and cast the model."""
    return _assigned(job, model, mapped=True)


@method("safetensors-load-model", build=on_meta, reads=(SAFETENSORS,))
def _safetensors_load_model(job: MethodJob, model: nn.Module) -> nn.Module:
    """Copy the file into the model with safetensors' own function for modules."""
    from safetensors.torch import load_model

    model = _allocated(model, job)
    load_model(model, job.checkpoint, device=job.device)
    return model


@method("safetensors-load-file", build=on_meta, reads=(SAFETENSORS, SHARDS))
def _safetensors_load_file(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the tensors, which are views of the mapped file, assign them to the model, and cast the model."""
    return _assigned(job, model)


@method("accelerate", build=_emptied_by_accelerate, reads=_FILES, imports=("accelerate:load_checkpoint_in_model",))
def _accelerate(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model; without a device map accelerate ignores the dtype."""
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(model, job.checkpoint, device_map={"": job.device}, dtype=job.torch_dtype)
    return model


def _safetensors_files(job: MethodJob) -> list[str]:
    """Return the file of a job, or those of its directory."""
    path = Path(job.checkpoint)
    return sorted(map(str, path.glob("*.safetensors"))) if path.is_dir() else [str(path)]


@method(
    "runai-streamer",
    build=on_meta,
    reads=(SAFETENSORS, SHARDS),
    imports=("runai_model_streamer:SafetensorsStreamer",),
)
def _runai_streamer(job: MethodJob, model: nn.Module) -> nn.Module:
    """Cast each tensor as it arrives and assign it; the streamer's tensors belong to the caller."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(_safetensors_files(job), device=job.device)
        arrived = {name: tensor.to(job.torch_dtype) for name, tensor in streamer.get_tensors()}
    model.load_state_dict(arrived, assign=True)
    return model


@method("fastsafetensors", build=on_meta, reads=(SAFETENSORS, SHARDS), imports=("fastsafetensors:fastsafe_open",))
def _fastsafetensors(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the file into one buffer and assign cast views of it to the model."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open(_safetensors_files(job), device=job.device, nogds=True) as loaded:
        views = {name: loaded.get_tensor(name).to(job.torch_dtype) for name in model.state_dict()}
    model.load_state_dict(views, assign=True)
    return model


@method("sluice-load-into", build=_without_memory, reads=(*_FILES, PARAMETERS, OTHER), imports=_SLUICE, takes_key=True)
def _sluice_load_into(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model with sluice."""
    return _filled(job, model)


@method("sluice-map", build=_without_memory, reads=(*_FILES, PARAMETERS, OTHER), imports=_SLUICE, takes_key=True)
def _sluice_map(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model with sluice, mapping tensors that need no cast, as the mapping peers do."""
    sluice.load_into(model, job.checkpoint, device=job.device, dtype=job.torch_dtype, key=job.key, place="map")
    return model


@method("raw-direct", reads=_FILES, takes_key=True)
def _raw_direct(job: MethodJob) -> Loaded:
    """Read the bytes with direct I/O, at the speed of the disk."""
    return read_file(job.checkpoint, direct=True, threads=8)


@method("raw-buffered", reads=_FILES, takes_key=True)
def _raw_buffered(job: MethodJob) -> Loaded:
    """Read the bytes through the page cache."""
    return read_file(job.checkpoint, direct=False, threads=len(os.sched_getaffinity(0)))


@method(REFERENCE, build=_without_memory, reads=(*_FILES, PARAMETERS), takes_key=True)
def _reference(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill the model with the random numbers of the checkpoint; another model with what torch or safetensors reads."""
    if not is_builtin(job.model):
        return truth(job, model)
    model = _allocated(model, job)

    def fill(item: tuple[str, torch.Tensor]) -> None:
        name, weight = item
        with torch.no_grad():
            weight.copy_(random_weight(name, weight.shape))

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # torch fills without the interpreter lock
        list(pool.map(fill, model.state_dict().items()))
    return model


#: The tutorial's methods in its order, and sluice.
STRATEGIES = (_naive, _sequential, _meta_sequential, _mapped, _per_parameter, _sluice)

#: Other loaders, in the order of the tables.
PEERS = (
    *(_raw_direct, _raw_buffered, _torch_load, _torch_mmap, _safetensors_load_model, _safetensors_load_file),
    *(_accelerate, _runai_streamer, _fastsafetensors, _sluice_load_into, _sluice_map),
)

#: Methods that load a model, by name.
LOADERS: dict[str, Method] = {each.name: each for each in (*STRATEGIES, *PEERS)}

#: All methods that a benchmark process can run, by name. A module that adds methods is among their ``imports``.
METHODS: dict[str, Method] = {**LOADERS, REFERENCE: _reference}


def absence(name: str) -> str:
    """Return the missing package of a method and how to install it, without imports; empty if all are installed."""
    packages = (each.partition(":")[0].partition(".")[0] for each in METHODS[name].imports)
    missing = next((package for package in packages if find_spec(package) is None), "")
    return f"{missing} is not installed: pip install {missing}" if missing else ""
