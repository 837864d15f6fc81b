"""Other loaders, each used as its documentation recommends.

The model is built on the meta device before the clock starts, so that no method pays for random numbers. Methods that
copy into a real model get one whose memory is allocated but not initialized, which is in their favor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from sluice.benchmark import raw as _raw
from sluice.benchmark.gpt2 import random_weight
from sluice.benchmark.records import (
    DCP,
    HUGGING_FACE,
    OTHER,
    PARAMETERS,
    PTH,
    SAFETENSORS,
    SHARDS,
    TENSORS,
    Kind,
    Loaded,
    Method,
    MethodJob,
)
from sluice.benchmark.subjects import build, is_builtin, read_state_dict, truth

__all__ = ["GPU_PEERS", "PEERS", "REFERENCE"]

_SAFETENSORS = (SAFETENSORS,)
_BOTH = (PTH, SAFETENSORS)
_FILES_OR_SHARDS = (SAFETENSORS, SHARDS)


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


def torch_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the whole state dict and copy it into the model."""
    model = _allocated(model, job)
    model.load_state_dict(read_state_dict(Path(job.checkpoint), job.key, device=job.device))
    return model


def torch_mmap(job: MethodJob, model: nn.Module) -> nn.Module:
    """Map the file, assign its tensors to the model, and cast the model."""
    return _assigned(job, model, mapped=True)


def torch_assign(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the whole state dict, assign its tensors to the model, and cast the model."""
    return _assigned(job, model)


def torch_dcp(job: MethodJob, model: nn.Module) -> nn.Module:
    """Let torch.distributed.checkpoint fill the tensors of the model in place."""
    from torch.distributed.checkpoint.state_dict_loader import load

    model = _allocated(model, job)
    load(model.state_dict(), checkpoint_id=job.checkpoint, no_dist=True)
    return model


def transformers_load(job: MethodJob, model: nn.Module) -> nn.Module:  # noqa: ARG001  (it builds its own model)
    """Let transformers build and fill its own model of the directory's configuration."""
    from transformers import AutoModelForCausalLM

    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=job.torch_dtype)
    return loaded.to(job.device)


def safetensors_load_model(job: MethodJob, model: nn.Module) -> nn.Module:
    """Copy the file into the model with safetensors' own function for modules."""
    from safetensors.torch import load_model

    model = _allocated(model, job)
    load_model(model, job.checkpoint, device=job.device)
    return model


def safetensors_load_file(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the tensors, which are views of the mapped file, assign them to the model, and cast the model."""
    return _assigned(job, model)


def accelerate_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model; without a device map accelerate ignores the dtype."""
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(model, job.checkpoint, device_map={"": job.device}, dtype=job.torch_dtype)
    return model


def runai_stream(job: MethodJob, model: nn.Module) -> nn.Module:
    """Cast each tensor as it arrives and assign it; the streamer's tensors belong to the caller."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(_safetensors_files(job), device=job.device)
        arrived = {name: tensor.to(job.torch_dtype) for name, tensor in streamer.get_tensors()}
    model.load_state_dict(arrived, assign=True)
    return model


def fastsafetensors_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Load the file into one buffer and assign cast views of it to the model."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open(_safetensors_files(job), device=job.device, nogds=True) as loaded:
        views = {name: loaded.get_tensor(name).to(job.torch_dtype) for name in model.state_dict()}
    model.load_state_dict(views, assign=True)
    return model


def instanttensor_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Cast each tensor as it arrives and assign it; since version 0.2 tensors belong to the caller."""
    open_file = import_module("instanttensor").safe_open
    with open_file(job.checkpoint, framework="pt", device=job.device) as loaded:
        arrived = {name: tensor.to(job.torch_dtype) for name, tensor in loaded.tensors()}
    model.load_state_dict(arrived, assign=True)
    return model


def tensorizer_load(job: MethodJob, model: nn.Module) -> nn.Module:
    """Deserialize tensorizer's own format with a cast, and assign its tensors to the model."""
    deserializer = import_module("tensorizer").TensorDeserializer
    with deserializer(job.checkpoint, device=job.device, dtype=job.torch_dtype) as loaded:
        model.load_state_dict(dict(loaded.items()), assign=True)
    return model


def with_sluice(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model with sluice."""
    import sluice

    sluice.load_into(model, job.checkpoint, device=job.device, dtype=job.torch_dtype, key=job.key)
    return model


def mapped_by_sluice(job: MethodJob, model: nn.Module) -> nn.Module:
    """Fill an empty model with sluice, mapping tensors that need no cast, as the mapping peers do."""
    import sluice

    sluice.load_into(model, job.checkpoint, device=job.device, dtype=job.torch_dtype, key=job.key, place="map")
    return model


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


def _raw_read(job: MethodJob, *, direct: bool) -> Loaded:
    threads = 8 if direct else len(os.sched_getaffinity(0))
    return _raw.read_file(job.checkpoint, direct=direct, threads=threads, huge_pages=job.claim_memory)


def _filling(
    name: str,
    fill: Callable[[MethodJob, nn.Module], Loaded],
    *,
    reads: tuple[Kind, ...],
    skeleton: Callable[[MethodJob], nn.Module] = _on_meta,
    imports: tuple[str, ...] = (),
    package: str = "",
    takes_key: bool = False,
) -> Method:
    def start(job: MethodJob) -> Callable[[], Loaded]:
        return partial(fill, job, skeleton(job))

    summary = (fill.__doc__ or "").strip().partition("\n")[0]
    return Method(
        name=name, start=start, imports=imports, reads=reads, summary=summary, package=package, takes_key=takes_key
    )


def _raw_method(name: str, summary: str, *, direct: bool) -> Method:
    def start(job: MethodJob) -> Callable[[], Loaded]:
        return partial(_raw_read, job, direct=direct)

    return Method(name=name, start=start, reads=(*_BOTH, SHARDS), summary=summary, takes_key=True)


#: Fills a model with the reference values; not a loader, so no table shows it.
REFERENCE = _filling(
    "reference",
    generate,
    reads=(PTH, SAFETENSORS, SHARDS, PARAMETERS),
    skeleton=_emptied_by_sluice,
    takes_key=True,
)

#: In the order of the tables.
PEERS = (
    _raw_method("raw-direct", "Read the bytes with direct I/O, at the speed of the disk.", direct=True),
    _raw_method("raw-buffered", "Read the bytes through the page cache.", direct=False),
    _filling("torch-load", torch_load, reads=(PTH,), takes_key=True),
    _filling("torch-mmap", torch_mmap, reads=(PTH,), takes_key=True),
    _filling("torch-assign", torch_assign, reads=(PTH,), takes_key=True),
    _filling("torch-dcp", torch_dcp, reads=(DCP,), imports=("torch.distributed.checkpoint",)),
    _filling("safetensors-load-model", safetensors_load_model, reads=_SAFETENSORS, imports=("safetensors.torch",)),
    _filling("safetensors-load-file", safetensors_load_file, reads=_FILES_OR_SHARDS, imports=("safetensors.torch",)),
    _filling(
        "accelerate",
        accelerate_load,
        reads=(*_BOTH, SHARDS),
        skeleton=_emptied_by_accelerate,
        imports=("accelerate:load_checkpoint_in_model",),
        package="accelerate",
    ),
    _filling(
        "transformers",
        transformers_load,
        reads=(HUGGING_FACE,),
        skeleton=lambda _: nn.Module(),
        imports=("transformers:AutoModelForCausalLM",),
        package="transformers",
    ),
    _filling(
        "runai-streamer",
        runai_stream,
        reads=_FILES_OR_SHARDS,
        imports=("runai_model_streamer:SafetensorsStreamer",),
        package="runai-model-streamer",
    ),
    _filling(
        "fastsafetensors",
        fastsafetensors_load,
        reads=_FILES_OR_SHARDS,
        imports=("fastsafetensors:fastsafe_open",),
        package="fastsafetensors",
    ),
    _filling(
        "tensorizer",
        tensorizer_load,
        reads=(TENSORS,),
        imports=("tensorizer:TensorDeserializer",),
        package="tensorizer",
    ),
    *(
        _filling(
            name,
            fill,
            reads=(*_BOTH, SHARDS, PARAMETERS, OTHER),
            skeleton=_emptied_by_sluice,
            imports=("sluice:empty_init", "sluice:load_into"),
            takes_key=True,
        )
        for name, fill in (("sluice-load-into", with_sluice), ("sluice-map", mapped_by_sluice))
    ),
)

#: Those that load onto CUDA devices only.
GPU_PEERS = (
    _filling(
        "instanttensor",
        instanttensor_load,
        reads=_SAFETENSORS,
        imports=("instanttensor:safe_open",),
        package="instanttensor",
    ),
)
