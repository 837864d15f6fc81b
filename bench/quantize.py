"""``python -m bench.quantize``: a quantized model from a file in bf16, by sluice and by other ways.

Each run is a new process with a cold page cache, whose memory another process samples. The methods take turns. The
clock starts after all imports, before the model is built. All results must have the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from safetensors.torch import load_file
from torch import nn

import sluice
from bench._common import options, run_alone, show, working_folder
from bench._llama import LLAMA_1B, LLAMA_TINY, LlamaShape, llama, write_directory
from sluice._units import format_bytes
from sluice.benchmark.cache import make_cold
from sluice.benchmark.records import Outcome, Work
from sluice.benchmark.table import TableSection

__all__ = ["CONFIGS", "METHODS", "main", "section", "work"]

_SHAPES: Mapping[str, LlamaShape] = {
    "tiny": LLAMA_TINY,
    "small": {**LLAMA_1B, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12},
    "1b": LLAMA_1B,
}

#: Layer that no method quantizes, because transformers does not.
_UNQUANTIZED = "lm_head"

#: Configurations of torchao by name.
CONFIGS: dict[str, Callable[[Any], Any]] = {
    "int8": lambda torchao: torchao.Int8WeightOnlyConfig(),
    "int8-dynamic": lambda torchao: torchao.Int8DynamicActivationInt8WeightConfig(),
    "float8": lambda torchao: torchao.Float8WeightOnlyConfig(),
    "int4": lambda torchao: torchao.IntxWeightOnlyConfig(
        weight_dtype=vars(torch)["int4"], granularity=torchao.PerGroup(32)
    ),
}


def _is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != _UNQUANTIZED


def _quantize(config: Any) -> Callable[[nn.Module], None]:
    return partial(import_module("torchao.quantization").quantize_, config=config, filter_fn=_is_quantized)


def _empty(shape: LlamaShape) -> nn.Module:
    with sluice.empty_init():
        return llama(**shape)


def _sluice(path: Path, shape: LlamaShape, config: Any) -> nn.Module:
    model = _empty(shape)
    sluice.load_into(model, path, dtype="auto", quantize=_quantize(config))
    return model


def _sluice_then(path: Path, shape: LlamaShape, config: Any) -> nn.Module:
    model = _empty(shape)
    sluice.load_into(model, path, dtype="auto")
    _quantize(config)(model)
    return model


def _assigned(path: Path, shape: LlamaShape, config: Any) -> nn.Module:
    with torch.device("meta"):
        model = llama(**shape)
    for file in sorted(path.glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False, assign=True)
    _quantize(config)(model)
    return model


def _transformers(path: Path, _: LlamaShape, config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM, TorchAoConfig

    chosen = TorchAoConfig(config, modules_to_not_convert=[_UNQUANTIZED])
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, quantization_config=chosen, dtype="auto")
    return model


def _accelerate(path: Path, shape: LlamaShape, config: Any) -> nn.Module:
    from accelerate import init_empty_weights, load_checkpoint_in_model

    with init_empty_weights():
        model = llama(**shape)
    load_checkpoint_in_model(model, str(path), device_map={"": "cpu"}, dtype=torch.bfloat16)
    _quantize(config)(model)
    return model


#: Ways to a quantized model by name, and the packages that they import.
METHODS: dict[str, tuple[Callable[[Path, LlamaShape, Any], nn.Module], tuple[str, ...]]] = {
    "sluice quantize=": (_sluice, ()),
    "sluice then quantize_": (_sluice_then, ()),
    "safetensors then quantize_": (_assigned, ()),
    "transformers": (_transformers, ("transformers.models.llama.modeling_llama", "transformers.quantizers.auto")),
    "accelerate then quantize_": (_accelerate, ("accelerate",)),
}


def work(method: str, config: str, path: str, shape: LlamaShape) -> Work:
    """Load and quantize: the work of a process. Returns the bytes of the weights, and a hash of them."""
    load, packages = METHODS[method]
    chosen = CONFIGS[config](import_module("torchao.quantization"))
    for package in packages:
        import_module(package)
    yield
    yield
    model = load(Path(path), shape, chosen)
    for _, plain in _plain(model):
        plain[::4096].sum()
    yield
    digest = hashlib.sha256()
    for name, plain in _plain(model):
        digest.update(name.encode())
        digest.update(plain.numpy().data)
    return {"bytes": sum(len(plain) for _, plain in _plain(model)), "hash": digest.hexdigest()}


def _plain(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the bytes of the plain tensors of all weights, with their names and classes."""

    def parts(tensor: Any) -> Iterator[torch.Tensor]:
        if not hasattr(tensor, "__tensor_flatten__"):
            yield tensor.detach().contiguous().flatten().view(torch.uint8)
            return
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts(getattr(tensor, name))

    for name, tensor in sorted(model.state_dict().items()):
        for plain in parts(tensor):
            yield f"{name} {type(tensor).__name__}", plain


def section(config: str, runs: Mapping[str, Sequence[Outcome]]) -> TableSection:
    """Return the table of a configuration: medians, and whether the bits are those of the first good run."""
    hashes = [run.facts["hash"] for each in runs.values() for run in each if run.status == "ok"]
    rows = []
    for method, own in runs.items():
        good = [run for run in own if run.status == "ok"]
        if not good:
            rows.append((method, "-", "-", "-", own[0].reason))
            continue
        peak = int(median(run.total_bytes for run in good))
        same = all(run.facts["hash"] == hashes[0] for run in good)
        above = format_bytes(peak - good[0].facts["bytes"])
        seconds = f"{median(run.seconds for run in good):.2f}"
        rows.append((method, seconds, format_bytes(peak), above, "yes" if same else "NO"))
    return TableSection(
        title=config, headings=("method", "s", "peak", "above the model", "same bits"), rows=tuple(rows)
    )


@click.command()
@options(size="1b", sizes=list(_SHAPES), runs=5)
@click.option("--config", "configs", type=click.Choice(list(CONFIGS)), multiple=True, default=("int8", "float8"))
@click.option("--method", "methods", type=click.Choice(list(METHODS)), multiple=True, default=tuple(METHODS))
@click.option("--shards", default=2, show_default=True, help="Files of the checkpoint.")
def main(
    size: str,
    runs: int,
    directory: Path | None,
    out: Path,
    configs: Sequence[str],
    methods: Sequence[str],
    shards: int,
) -> None:
    """Measure the memory and the time of loads that quantize."""
    sections = []
    with working_folder(directory) as folder:
        path = folder / f"{size}-{shards}"
        if not path.exists():
            write_directory(path, _SHAPES[size], shards=shards)
        for config in configs:
            done: dict[str, list[Outcome]] = {method: [] for method in methods}
            for number in range(runs):
                for method in [*methods[number % len(methods) :], *methods[: number % len(methods)]]:
                    make_cold(path)
                    job = {"method": method, "config": config, "path": str(path), "shape": _SHAPES[size]}
                    done[method].append(run_alone("bench.quantize:work", job))
            sections.append(section(config, done))
    show(out, "quantize", ("torch", "sluice", "torchao", "transformers", "accelerate"), sections)
    if any(row[-1] == "NO" for each in sections for row in each.rows):
        raise click.ClickException("results differ")


if __name__ == "__main__":
    main()
