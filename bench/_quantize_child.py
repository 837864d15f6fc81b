"""A process of ``bench.quantize``: one way to a quantized model. It says when it is ready, and when it is done."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import sluice
from sluice.benchmark.llama import llama
from sluice.machine.peaks import restart_peak

__all__ = ["CONFIGS", "METHODS", "UNQUANTIZED"]

#: Layer that no method quantizes, because transformers does not.
UNQUANTIZED = "lm_head"

#: Configurations of torchao by name.
CONFIGS: dict[str, Callable[[Any], Any]] = {
    "int8": lambda torchao: torchao.Int8WeightOnlyConfig(),
    "int8-dynamic": lambda torchao: torchao.Int8DynamicActivationInt8WeightConfig(),
    "float8": lambda torchao: torchao.Float8WeightOnlyConfig(),
    "int4": lambda torchao: torchao.IntxWeightOnlyConfig(
        weight_dtype=vars(torch)["int4"], granularity=torchao.PerGroup(32)
    ),
}

Load = Callable[[Path, dict[str, int], Any], nn.Module]


def _is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != UNQUANTIZED


def _quantize(config: Any) -> Callable[[nn.Module], None]:
    from torchao.quantization import quantize_

    return partial(quantize_, config=config, filter_fn=_is_quantized)


def _empty(shape: dict[str, int]) -> nn.Module:
    with sluice.empty_init():
        return llama(**shape)


def _sluice(path: Path, shape: dict[str, int], config: Any) -> nn.Module:
    model = _empty(shape)
    sluice.load_into(model, path, dtype="auto", quantize=_quantize(config))
    return model


def _sluice_then(path: Path, shape: dict[str, int], config: Any) -> nn.Module:
    model = _empty(shape)
    sluice.load_into(model, path, dtype="auto")
    _quantize(config)(model)
    return model


def _assigned(path: Path, shape: dict[str, int], config: Any) -> nn.Module:
    with torch.device("meta"):
        model = llama(**shape)
    for file in sorted(path.glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False, assign=True)
    _quantize(config)(model)
    return model


def _transformers(path: Path, _: dict[str, int], config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM, TorchAoConfig

    chosen = TorchAoConfig(config, modules_to_not_convert=[UNQUANTIZED])
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, quantization_config=chosen, dtype="auto")
    return model


def _accelerate(path: Path, shape: dict[str, int], config: Any) -> nn.Module:
    from accelerate import init_empty_weights, load_checkpoint_in_model

    with init_empty_weights():
        model = llama(**shape)
    load_checkpoint_in_model(model, str(path), device_map={"": "cpu"}, dtype=torch.bfloat16)
    _quantize(config)(model)
    return model


#: Ways to a quantized model by name, and the packages that they import.
METHODS: dict[str, tuple[Load, tuple[str, ...]]] = {
    "sluice quantize=": (_sluice, ()),
    "sluice then quantize_": (_sluice_then, ()),
    "safetensors then quantize_": (_assigned, ()),
    "transformers": (_transformers, ("transformers.models.llama.modeling_llama", "transformers.quantizers.auto")),
    "accelerate then quantize_": (_accelerate, ("accelerate",)),
}


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def _touch(model: nn.Module) -> None:
    """Read one byte of each page of all weights."""
    for tensor in model.state_dict().values():
        for plain in _plain(tensor):
            plain.detach().contiguous().flatten().view(torch.uint8)[::4096].sum()


def _fingerprint(model: nn.Module) -> str:
    """Return a hash of all weights, with their names and classes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {type(tensor).__name__}".encode())
        for plain in _plain(tensor):
            digest.update(plain.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _main() -> None:
    job = json.loads(sys.argv[1])
    load, packages = METHODS[job["method"]]
    from importlib import import_module

    torchao = import_module("torchao.quantization")
    for package in packages:
        import_module(package)
    config = CONFIGS[job["config"]](torchao)
    exact = restart_peak()
    print(json.dumps({"event": "ready", "exact": exact}), flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    model = load(Path(job["path"]), job["shape"], config)
    _touch(model)
    seconds = time.perf_counter() - begin
    print(json.dumps({"event": "loaded", "seconds": seconds}), flush=True)
    sys.stdin.readline()
    nbytes = sum(plain.nbytes for tensor in model.state_dict().values() for plain in _plain(tensor))
    print(json.dumps({"event": "checked", "bytes": nbytes, "hash": _fingerprint(model)}), flush=True)


if __name__ == "__main__":
    _main()
