"""Other loaders, each used as its documentation recommends.

The model is built on the meta device before the clock starts, so that no method pays for random numbers. Methods that
copy into a real model get one whose memory is allocated but not initialized, which is in their favor.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from sluice.benchmark.gpt2 import random_weight
from sluice.benchmark.raw import read_file
from sluice.benchmark.records import (
    DCP,
    OTHER,
    PARAMETERS,
    PTH,
    SAFETENSORS,
    SHARDS,
    TENSORS,
    Loaded,
    MethodJob,
    method,
)
from sluice.benchmark.subjects import build, is_builtin, read_state_dict, truth

__all__ = ["PEERS", "REFERENCE"]

_EVERYTHING = (PTH, SAFETENSORS, SHARDS, PARAMETERS, OTHER)
_SLUICE = ("sluice:empty_init", "sluice:load_into")


def _on_meta(job: MethodJob) -> nn.Module:
    with torch.device("meta"):
        return build(job)


def _emptied_by_sluice(job: MethodJob) -> nn.Module:
    import sluice

    with sluice.empty_init():
        return build(job)


def _emptied_by_accelerate(job: MethodJob) -> nn.Module:
    from accelerate import init_empty_weights

    with init_empty_weights():
        return build(job)


def _safetensors_files(job: MethodJob) -> list[str]:
    """Return the file of a job, or those of its directory."""
    path = Path(job.checkpoint)
    return sorted(map(str, path.glob("*.safetensors"))) if path.is_dir() else [str(path)]


def _allocated(model: nn.Module, job: MethodJob) -> nn.Module:
    return model.to(job.torch_dtype).to_empty(device=job.device)


def _assigned(job: MethodJob, model: nn.Module, *, mapped: bool = False) -> nn.Module:
    """Assign the tensors of the file to the model, and cast the model."""
    state_dict = read_state_dict(Path(job.checkpoint), job.key, device=job.device, mapped=mapped)
    model.load_state_dict(state_dict, assign=True)
    del state_dict  # else the cast would keep every fp32 tensor alive
    return model.to(job.torch_dtype)


@method("torch-load", build=_on_meta, reads=(PTH,), takes_key=True)
def torch_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the whole state dict and copy it into the model."""
    model = _allocated(model, job)
    model.load_state_dict(read_state_dict(Path(job.checkpoint), job.key, device=job.device))
    return model


@method("torch-mmap", build=_on_meta, reads=(PTH,), takes_key=True)
def torch_mmap(job: MethodJob, model: nn.Module) -> nn.Module:
    """Map the file, assign its tensors to the model, and cast the model."""
    return _assigned(job, model, mapped=True)


@method("torch-assign", build=_on_meta, reads=(PTH,), takes_key=True)
def torch_assign(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the whole state dict, assign its tensors to the model, and cast the model."""
    return _assigned(job, model)


@method("torch-dcp", build=_on_meta, reads=(DCP,), imports=("torch.distributed.checkpoint",))
def torch_dcp(job: MethodJob, model: nn.Module) -> nn.Module:
    """Let torch.distributed.checkpoint fill the tensors of the model in place."""
    from torch.distributed.checkpoint.state_dict_loader import load

    model = _allocated(model, job)
    load(model.state_dict(), checkpoint_id=job.checkpoint, no_dist=True)
    return model


@method("safetensors-load-model", build=_on_meta, reads=(SAFETENSORS,), imports=("safetensors.torch",))
def safetensors_load_model(job: MethodJob, model: nn.Module) -> nn.Module:
    """Copy the file into the model with safetensors' own function for modules."""
    from safetensors.torch import load_model

    model = _allocated(model, job)
    load_model(model, job.checkpoint, device=job.device)
    return model


@method("safetensors-load-file", build=_on_meta, reads=(SAFETENSORS, SHARDS), imports=("safetensors.torch",))
def safetensors_load_file(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the tensors, which are views of the mapped file, assign them to the model, and cast the model."""
    return _assigned(job, model)


@method(
    "accelerate",
    build=_emptied_by_accelerate,
    reads=(PTH, SAFETENSORS, SHARDS),
    imports=("accelerate:load_checkpoint_in_model",),
)
def accelerate_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model; without a device map accelerate ignores the dtype."""
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(model, job.checkpoint, device_map={"": job.device}, dtype=job.torch_dtype)
    return model


@method(
    "runai-streamer",
    build=_on_meta,
    reads=(SAFETENSORS, SHARDS),
    imports=("runai_model_streamer:SafetensorsStreamer",),
)
def runai_stream(job: MethodJob, model: nn.Module) -> nn.Module:
    """Cast each tensor as it arrives and assign it; the streamer's tensors belong to the caller."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(_safetensors_files(job), device=job.device)
        arrived = {name: tensor.to(job.torch_dtype) for name, tensor in streamer.get_tensors()}
    model.load_state_dict(arrived, assign=True)
    return model


@method(
    "fastsafetensors",
    build=_on_meta,
    reads=(SAFETENSORS, SHARDS),
    imports=("fastsafetensors:fastsafe_open",),
)
def fastsafetensors_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the file into one buffer and assign cast views of it to the model."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open(_safetensors_files(job), device=job.device, nogds=True) as loaded:
        views = {name: loaded.get_tensor(name).to(job.torch_dtype) for name in model.state_dict()}
    model.load_state_dict(views, assign=True)
    return model


@method(
    "tensorizer",
    build=_on_meta,
    reads=(TENSORS,),
    imports=("tensorizer:TensorDeserializer",),
)
def tensorizer_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Deserialize tensorizer's own format with a cast, and assign its tensors to the model."""
    deserializer = import_module("tensorizer").TensorDeserializer
    with deserializer(job.checkpoint, device=job.device, dtype=job.torch_dtype) as loaded:
        model.load_state_dict(dict(loaded.items()), assign=True)
    return model


@method("sluice-load-into", build=_emptied_by_sluice, reads=_EVERYTHING, imports=_SLUICE, takes_key=True)
def with_sluice(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model with sluice."""
    import sluice

    sluice.load_into(model, job.checkpoint, device=job.device, dtype=job.torch_dtype, key=job.key)
    return model


@method("sluice-map", build=_emptied_by_sluice, reads=_EVERYTHING, imports=_SLUICE, takes_key=True)
def mapped_by_sluice(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model with sluice, mapping tensors that need no cast, as the mapping peers do."""
    import sluice

    sluice.load_into(model, job.checkpoint, device=job.device, dtype=job.torch_dtype, key=job.key, place="map")
    return model


@method("reference", build=_emptied_by_sluice, reads=(PTH, SAFETENSORS, SHARDS, PARAMETERS), takes_key=True)
def generate(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill the model with the reference values: the random numbers of the checkpoint, generated and not read.

    A model that is not built in is filled with the values that torch or safetensors reads, name by name.
    """
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


@method("raw-direct", reads=(PTH, SAFETENSORS, SHARDS), takes_key=True)
def raw_direct(job: MethodJob) -> Loaded:
    """Read the bytes with direct I/O, at the speed of the disk."""
    return read_file(job.checkpoint, direct=True, threads=8)


@method("raw-buffered", reads=(PTH, SAFETENSORS, SHARDS), takes_key=True)
def raw_buffered(job: MethodJob) -> Loaded:
    """Read the bytes through the page cache."""
    return read_file(job.checkpoint, direct=False, threads=len(os.sched_getaffinity(0)))


#: Fills a model with the reference values; not a loader, so no table shows it.
REFERENCE = generate

#: In the order of the tables.
PEERS = (
    raw_direct,
    raw_buffered,
    torch_load,
    torch_mmap,
    torch_assign,
    torch_dcp,
    safetensors_load_model,
    safetensors_load_file,
    accelerate_load,
    runai_stream,
    fastsafetensors_load,
    tensorizer_load,
    with_sluice,
    mapped_by_sluice,
)
