"""The ways of ``bench.remote`` to load a model from a server, each as its documentation says and in its fastest way.

Every way gets a model on the meta device with parameters in the dtype in which they are to finish, and the addresses
of one checkpoint. What a way imports is imported before the clock starts.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

import torch
from msgspec import Struct
from torch import nn

from bench._raw_http import Span, huge_memory, in_parallel, receive, spans

__all__ = [
    "BUCKET",
    "CONTENDERS",
    "METHODS",
    "PTH",
    "RAW",
    "SAFETENSORS",
    "SHARDS",
    "Checkpoint",
    "Method",
    "bit_sum",
    "environment",
    "read_sums",
    "sums_of",
]

#: Kinds of checkpoints: one torch file, one safetensors file, shards of safetensors in Hugging Face's layout.
PTH, SAFETENSORS, SHARDS = "pth", "safetensors", "shards"

#: Folder of the server with the checkpoints, which S3 calls a bucket.
BUCKET = "bucket"

RAW = "raw client"


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A checkpoint on a server."""

    port: int
    #: Path in the bucket of each file with its size; those of weights only.
    files: tuple[tuple[str, int], ...]
    kind: str

    @property
    def http(self) -> str:
        """Address by HTTP."""
        return f"http://127.0.0.1:{self.port}/{BUCKET}/{self._name}"

    @property
    def s3(self) -> str:
        """Address by S3."""
        return f"s3://{BUCKET}/{self._name}"

    @property
    def endpoint(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def _name(self) -> str:
        name = self.files[0][0]
        return name if self.kind != SHARDS else name.rpartition("/")[0] + "/"


class Method(Struct, frozen=True, kw_only=True):
    """A way to load."""

    #: Loads a checkpoint into the model.
    load: Callable[[nn.Module, Checkpoint], object]
    reads: tuple[str, ...]
    #: Modules that are imported before the clock starts.
    imports: tuple[str, ...]
    #: Whether it fills the model; the raw client receives bytes only.
    fills: bool = True


_KEPT: list[object] = []


def _raw(_model: nn.Module, checkpoint: Checkpoint) -> None:
    files = [(f"/{BUCKET}/{name}", size) for name, size in checkpoint.files]
    total = sum(size for _, size in files)
    memory = huge_memory(total)
    _KEPT.append(memory)
    # Four requests for each connection, of 8 MiB at least: more cost latency, fewer end at different times.
    receive(checkpoint.port, spans(files, max(8 << 20, total // 64)), memoryview(memory))


def _sluice(model: nn.Module, checkpoint: Checkpoint) -> None:
    import sluice

    sluice.load_into(model, checkpoint.http)


def _sluice_s3(model: nn.Module, checkpoint: Checkpoint) -> None:
    import sluice

    sluice.load_into(model, checkpoint.s3)


def _assign(model: nn.Module, found: Mapping[str, torch.Tensor]) -> None:
    dtype = next(model.parameters()).dtype
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in found.items()}, strict=False, assign=True)


def _fsspec(model: nn.Module, checkpoint: Checkpoint) -> None:
    opened = import_module("fsspec").open
    for name, _ in checkpoint.files:
        with opened(f"{checkpoint.endpoint}/{BUCKET}/{name}", "rb") as file:
            if checkpoint.kind == PTH:
                _assign(model, torch.load(file, weights_only=True))
            else:
                _assign(model, import_module("safetensors.torch").load(file.read()))


def _download(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Download with 8 connections to a folder on the disk, and load from there."""
    import http.client

    todo = spans([(f"/{BUCKET}/{name}", size) for name, size in checkpoint.files], 8 << 20)
    with tempfile.TemporaryDirectory(dir=os.environ.get("SLUICE_BENCH_FOLDER")) as folder:
        local = {f"/{BUCKET}/{name}": Path(folder, Path(name).name) for name, _ in checkpoint.files}
        opened = {name: os.open(path, os.O_CREAT | os.O_WRONLY) for name, path in local.items()}

        def work(mine: Iterator[Span]) -> None:
            client = http.client.HTTPConnection("127.0.0.1", checkpoint.port, timeout=60)
            buffer = memoryview(bytearray(1 << 20))
            for span in mine:
                asked = {"Range": f"bytes={span.begin}-{span.begin + span.nbytes - 1}"}
                client.request("GET", span.path, headers=asked)
                answer, done = client.getresponse(), 0
                while found := answer.readinto(buffer):
                    os.pwrite(opened[span.path], buffer[:found], span.begin + done)
                    done += found
            client.close()

        in_parallel(work, todo, 8)
        for descriptor in opened.values():
            os.close(descriptor)
        for path in local.values():
            if checkpoint.kind == PTH:
                _assign(model, torch.load(path, weights_only=True, mmap=True))
            else:
                _assign(model, import_module("safetensors.torch").load_file(path))
        # A mapping of a deleted file stays valid, and its pages are touched on the clock.


def _runai(model: nn.Module, checkpoint: Checkpoint) -> None:
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files([f"s3://{BUCKET}/{name}" for name, _ in checkpoint.files])
        dtype = next(model.parameters()).dtype
        # A cast copies; otherwise the tensor is a view of the streamer's buffer, which belongs to the caller.
        _assign(model, {name: tensor.to(dtype) for name, tensor in streamer.get_tensors()})


def _s3torch(model: nn.Module, checkpoint: Checkpoint) -> None:
    library = import_module("s3torchconnector")
    config = library.S3ClientConfig(force_path_style=True)
    store = library.S3Checkpoint(region="us-east-1", endpoint=checkpoint.endpoint, s3client_config=config)
    for name, _ in checkpoint.files:
        with store.reader(f"s3://{BUCKET}/{name}") as file:
            if checkpoint.kind == PTH:
                _assign(model, torch.load(file, weights_only=True))
            else:
                _assign(model, import_module("safetensors.torch").load(file.read()))


_ALL = (PTH, SAFETENSORS, SHARDS)

#: Ways to load by name.
METHODS: Mapping[str, Method] = {
    RAW: Method(load=_raw, reads=_ALL, imports=("http.client",), fills=False),
    "sluice http": Method(load=_sluice, reads=_ALL, imports=("sluice", "sluice.api.load", "urllib3")),
    "sluice s3": Method(load=_sluice_s3, reads=_ALL, imports=("sluice", "sluice.api.load", "obstore.store")),
    "fsspec file": Method(load=_fsspec, reads=_ALL, imports=("fsspec.implementations.http", "safetensors.torch")),
    "download, then load": Method(load=_download, reads=_ALL, imports=("http.client", "safetensors.torch")),
    "Run:ai streamer": Method(
        load=_runai, reads=(SAFETENSORS, SHARDS), imports=("runai_model_streamer", "runai_model_streamer_s3", "boto3")
    ),
    "s3torchconnector": Method(load=_s3torch, reads=_ALL, imports=("s3torchconnector", "safetensors.torch")),
}

#: Those that are run on every network; the others only where the peers are compared.
CONTENDERS = (RAW, "sluice http")


def environment(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the variables with which the clients of S3 find the server, and no other place."""
    return {
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": checkpoint.endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_ENDPOINT": checkpoint.endpoint,
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "no_proxy": "127.0.0.1",
    }


def sums_of(state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the sum of the bit patterns of all weights in each dtype, with which every load must finish."""
    return {
        "float32": sum(bit_sum(tensor) for tensor in state.values()),
        "bfloat16": sum(bit_sum(tensor.to(torch.bfloat16)) for tensor in state.values()),
    }


def bit_sum(tensor: torch.Tensor) -> int:
    """Return the sum of the bit patterns of a tensor."""
    integers = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return int(tensor.detach().reshape(-1).view(integers).sum(dtype=torch.int64))


def read_sums(folder: Path) -> dict[str, int]:
    """Return what ``sums_of`` said when the files were written."""
    found: dict[str, int] = json.loads((folder / "sums.json").read_text(encoding="utf-8"))
    return found
