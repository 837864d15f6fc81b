"""A process of ``bench.quantize --forms``: one model in one form. It says when it is ready, and when it is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import sluice
from bench._quantize_child import CONFIGS
from sluice._units import parse_bytes
from sluice.benchmark.gpt2 import gpt2
from sluice.machine.peaks import restart_peak

__all__ = ["FORMS", "SAVED_CONFIG", "quantized"]

#: Configuration of the file of quantized weights.
SAVED_CONFIG = "int8"


class Outcome(NamedTuple):
    """A model in a form."""

    #: The model, which keeps the memory.
    model: nn.Module
    #: Bytes of its weights in memory.
    finished: int
    #: The predicted peak.
    predicted: int


#: The directory of files and the size of the model.
Make = Callable[[Path, str], Outcome]


def quantized(config: str) -> Callable[[nn.Module], None]:
    """Return a function that quantizes the linear layers of a model."""
    from torchao.quantization import quantize_

    return partial(quantize_, config=CONFIGS[config](sys.modules["torchao.quantization"]))


def _empty(size: str) -> nn.Module:
    with sluice.empty_init():
        return gpt2(size).eval()


def _loaded(folder: Path, size: str, *, file: str = "fp32.safetensors", config: str = "", **options: Any) -> Outcome:
    model = _empty(size)
    if config:
        options["quantize"] = quantized(config)
    report = sluice.load_into(model, folder / file, **options)
    for tensor in model.state_dict().values():
        if not hasattr(tensor, "__tensor_flatten__"):
            tensor.flatten().view(torch.uint8)[::4096].sum()  # a mapped page is there when it was touched
    return Outcome(model, report.final_bytes, report.predicted.total_bytes)


def _bitsandbytes(folder: Path, size: str, *, layer: str, **options: Any) -> Outcome:
    import bitsandbytes

    with sluice.empty_init():
        model = gpt2(size).eval()
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear:
                make, bias = getattr(bitsandbytes.nn, layer), module.bias is not None
                model.set_submodule(name, make(module.in_features, module.out_features, bias, **options))
    report = sluice.load_into(model, folder / "fp32.safetensors", quantize="bitsandbytes")
    return Outcome(model, report.final_bytes, report.predicted.total_bytes)


def _saved(folder: Path, size: str) -> Outcome:
    model = _empty(size)
    quantized(SAVED_CONFIG)(model)
    report = sluice.load_into(model, folder / "quantized.safetensors")
    return Outcome(model, report.final_bytes, report.predicted.total_bytes)


def _streamed(folder: Path, size: str, *, share: float, file: str = "fp32.safetensors") -> Outcome:
    model = _empty(size)
    if file == "quantized.safetensors":
        quantized(SAVED_CONFIG)(model)
    memory = int(sluice.plan(model, folder / file).final_bytes * share)
    with torch.inference_mode(), sluice.stream(model, folder / file, memory=memory) as stream:
        for _ in range(3):
            model(torch.tensor([[1, 2, 3]]))
        held = stream.report.resident_bytes + stream.report.window_bytes
    return Outcome(model, held, memory + parse_bytes(sluice.MemoryLimits().staging))


FORMS: dict[str, Make] = {
    "fp32": _loaded,
    'fp32, `place="map"`': partial(_loaded, place="map"),
    "fp32, streamed at 50 %": partial(_streamed, share=0.5),
    "fp32, streamed at 25 %": partial(_streamed, share=0.25),
    "bf16": partial(_loaded, dtype="bf16"),
    "float8, `quantize=`": partial(_loaded, config="float8"),
    "int8, `quantize=`": partial(_loaded, config="int8"),
    "int8, from a saved file": _saved,
    "int8, streamed at 50 %": partial(_streamed, share=0.5, file="quantized.safetensors"),
    "int4 in groups of 32, `quantize=`": partial(_loaded, config="int4"),
    "int8 of bitsandbytes": partial(_bitsandbytes, layer="Linear8bitLt", has_fp16_weights=False),
    "nf4 of bitsandbytes": partial(_bitsandbytes, layer="LinearNF4", compress_statistics=False),
    "nf4 of bitsandbytes, nested": partial(_bitsandbytes, layer="LinearNF4"),
    "fp32 from GGUF Q8_0": partial(_loaded, file="q8_0.gguf"),
    "fp32 from GGUF Q4_0": partial(_loaded, file="q4_0.gguf"),
    "bf16 from GGUF Q4_0": partial(_loaded, file="q4_0.gguf", dtype="bf16"),
    "fp32 from GGUF Q4_0, streamed at 25 %": partial(_streamed, share=0.25, file="q4_0.gguf"),
}


def _main() -> None:
    job = json.loads(sys.argv[1])
    make, form = FORMS[job["form"]], job["form"]
    if "bitsandbytes" in form:
        import bitsandbytes

        bitsandbytes.functional.quantize_4bit(torch.ones(4096))
    elif "int" in form or "float8" in form:
        import torchao.quantization

        assert torchao
    with torch.inference_mode():
        gpt2("tiny")(torch.tensor([[1]]))  # what torch allocates for the first call of any model
    exact = restart_peak()
    print(json.dumps({"event": "ready", "exact": exact}), flush=True)
    sys.stdin.readline()
    made = make(Path(job["path"]), job["size"])
    print(json.dumps({"event": "loaded"}), flush=True)
    sys.stdin.readline()
    print(json.dumps({"event": "checked", "finished": made.finished, "predicted": made.predicted}), flush=True)


if __name__ == "__main__":
    _main()
