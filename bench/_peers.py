"""Methods that only these benchmarks run: raw reads, and loaders that ``sluice bench`` does not compare.

The model is built on the meta device before the clock starts; methods that copy into a real model get one whose memory
is allocated but not initialized.
"""

from __future__ import annotations

import mmap
import os
from importlib import import_module
from pathlib import Path

from torch import nn

import sluice
from bench._raw import read_file
from sluice.benchmark.methods import (
    FILES,
    METHODS,
    PEERS,
    SLUICE,
    allocated,
    assigned,
    filled,
    on_meta,
    read_state_dict,
    without_memory,
)
from sluice.benchmark.records import OTHER, PARAMETERS, PTH, SAFETENSORS, SHARDS, Kind, MethodJob, method

__all__ = ["ALL_PEERS", "HUGGING_FACE", "instanttensor_load", "transformers_load"]

#: A directory with shards and a ``config.json`` of transformers.
HUGGING_FACE: Kind = "hugging-face"


@method("torch-load", build=on_meta, reads=(PTH,), takes_key=True)
def torch_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the whole state dict and copy it into the model."""
    model = allocated(model, job)
    model.load_state_dict(read_state_dict(Path(job.checkpoint), job.key, device=job.device))
    return model


@method("torch-mmap", build=on_meta, reads=(PTH,), takes_key=True)
def torch_mmap(job: MethodJob, model: nn.Module) -> nn.Module:
    """Map the file, assign its tensors to the model, and cast the model."""
    return assigned(job, model, mapped=True)


@method("safetensors-load-model", build=on_meta, reads=(SAFETENSORS,))
def safetensors_load_model(job: MethodJob, model: nn.Module) -> nn.Module:
    """Copy the file into the model with safetensors' own function for modules."""
    from safetensors.torch import load_model

    model = allocated(model, job)
    load_model(model, job.checkpoint, device=job.device)
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
def runai_streamer(job: MethodJob, model: nn.Module) -> nn.Module:
    """Cast each tensor as it arrives and assign it; the streamer's tensors belong to the caller."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(_safetensors_files(job), device=job.device)
        arrived = {name: tensor.to(job.torch_dtype) for name, tensor in streamer.get_tensors()}
    model.load_state_dict(arrived, assign=True)
    return model


@method("fastsafetensors", build=on_meta, reads=(SAFETENSORS, SHARDS), imports=("fastsafetensors:fastsafe_open",))
def fastsafetensors_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the file into one buffer and assign cast views of it to the model."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open(_safetensors_files(job), device=job.device, nogds=True) as loaded:
        views = {name: loaded.get_tensor(name).to(job.torch_dtype) for name in model.state_dict()}
    model.load_state_dict(views, assign=True)
    return model


@method(
    "sluice-load-into",
    build=without_memory,
    reads=(*FILES, PARAMETERS, OTHER),
    imports=SLUICE,
    takes_key=True,
)
def sluice_load_into(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model with sluice."""
    return filled(job, model)


@method("sluice-map", build=without_memory, reads=(*FILES, PARAMETERS, OTHER), imports=SLUICE, takes_key=True)
def sluice_map(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model with sluice, mapping tensors that need no cast, as the mapping peers do."""
    sluice.load_into(model, job.checkpoint, device=job.device, dtype=job.torch_dtype, key=job.key, place="map")
    return model


@method("raw-direct", reads=FILES, takes_key=True)
def raw_direct(job: MethodJob) -> mmap.mmap:
    """Read the bytes with direct I/O, at the speed of the disk."""
    return read_file(job.checkpoint, direct=True, threads=8)


@method("raw-buffered", reads=FILES, takes_key=True)
def raw_buffered(job: MethodJob) -> mmap.mmap:
    """Read the bytes through the page cache."""
    return read_file(job.checkpoint, direct=False, threads=len(os.sched_getaffinity(0)))


@method("transformers", reads=(HUGGING_FACE,), imports=("transformers:AutoModelForCausalLM",))
def transformers_load(job: MethodJob) -> nn.Module:
    """Let transformers build and fill its own model of the directory's configuration."""
    from transformers import AutoModelForCausalLM

    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=job.torch_dtype)
    return loaded.to(job.device)


@method("instanttensor", build=on_meta, reads=(SAFETENSORS,), imports=("instanttensor:safe_open",))
def instanttensor_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Cast each tensor as it arrives and assign it; since version 0.2 tensors belong to the caller."""
    open_file = import_module("instanttensor").safe_open
    with open_file(job.checkpoint, framework="pt", device=job.device) as loaded:
        arrived = {name: tensor.to(job.torch_dtype) for name, tensor in loaded.tensors()}
    model.load_state_dict(arrived, assign=True)
    return model


#: Every peer of ``bench.load``, in the order of its tables.
ALL_PEERS = (
    *(raw_direct, raw_buffered, torch_load, torch_mmap, safetensors_load_model, *PEERS),
    *(runai_streamer, fastsafetensors_load, transformers_load, sluice_load_into, sluice_map),
)

METHODS.update({each.name: each for each in (*ALL_PEERS, instanttensor_load)})
