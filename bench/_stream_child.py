"""A process of ``bench.stream``: a model that runs from its file by one method, called several times."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sluice
from sluice.benchmark.gpt2 import gpt2

__all__ = ["METHODS"]

Attach = Callable[[nn.Module, Path, int], AbstractContextManager[nn.Module]]


def _empty(size: str) -> nn.Module:
    with sluice.empty_init():
        return gpt2(size).eval()


@contextlib.contextmanager
def _streamed(model: nn.Module, path: Path, memory: int) -> Iterator[nn.Module]:
    with sluice.stream(model, path, memory=memory) as stream:
        yield model
    print(stream, file=sys.stderr)


@contextlib.contextmanager
def _loaded(model: nn.Module, path: Path, _: int) -> Iterator[nn.Module]:
    sluice.load_into(model, path)
    yield model


@contextlib.contextmanager
def _mapped(model: nn.Module, path: Path, _: int) -> Iterator[nn.Module]:
    sluice.load_into(model, path, place="map")
    yield model


@contextlib.contextmanager
def _torch_mapped(model: nn.Module, path: Path, _: int) -> Iterator[nn.Module]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        model.load_state_dict(load_file(path), assign=True)
    else:
        model.load_state_dict(torch.load(path, mmap=True, weights_only=True), assign=True)
    yield model


@contextlib.contextmanager
def _accelerate(model: nn.Module, path: Path, _: int) -> Iterator[nn.Module]:
    """Every weight on disk, read from the safetensors file itself: ``disk_offload`` would write a copy of each."""
    from accelerate import dispatch_model
    from accelerate.utils import set_module_tensor_to_device
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name, _buffer in model.named_buffers():
            set_module_tensor_to_device(model, name, "cpu", file.get_tensor(name))
    index = {name: {"safetensors_file": str(path), "weight_name": name} for name in names}
    yield dispatch_model(
        model, device_map={"": "disk"}, main_device="cpu", offload_index=index, offload_buffers=False, force_hooks=True
    )


METHODS: dict[str, Attach] = {
    "sluice": _streamed,
    "sluice, place=map": _mapped,
    "mmap": _torch_mapped,
    "accelerate": _accelerate,
    "loaded": _loaded,
}


def _fetched() -> int:
    """Return the bytes that this process has fetched from disks."""
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main() -> None:
    """Attach a file to a model, call it, and print what each call took."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    model = _empty(job["size"])
    tokens = torch.arange(job["batch"] * job["tokens"]).reshape(job["batch"], job["tokens"]) % 50_000
    calls = []
    with torch.inference_mode(), METHODS[job["method"]](model, Path(job["path"]), job["memory"]) as running:
        for _ in range(job["calls"]):
            before, begin = _fetched(), time.perf_counter()
            logits = running(tokens)
            calls.append({"seconds": time.perf_counter() - begin, "read": _fetched() - before})
        digest = hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()
    print(json.dumps({"calls": calls, "logits": digest}))


if __name__ == "__main__":
    main()
