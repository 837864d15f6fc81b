"""The ways of ``bench.stream`` to run a model from its file, and the work of its processes."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

import sluice
from bench._stream_models import model_of
from sluice.benchmark.records import Work

__all__ = ["INFERENCE_ONLY", "METHODS", "PREPARATIONS", "fetched_bytes", "same_dtype_only", "work"]

Attach = Callable[[nn.Module, Path, int], AbstractContextManager[nn.Module]]


def _empty(size: str, dtype: torch.dtype) -> nn.Module:
    with sluice.empty_init():
        return model_of(size).eval().to(dtype)


@contextlib.contextmanager
def _streamed(model: nn.Module, path: Path, memory: int) -> Iterator[nn.Module]:
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    with sluice.stream(model, path, memory=memory, train=frozen) as stream:
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
            set_module_tensor_to_device(model, name, "cpu", file.get_tensor(name), dtype=_dtype_of(model))
    dtype = str(_dtype_of(model)).removeprefix("torch.")
    index = {name: {"safetensors_file": str(path), "weight_name": name, "dtype": dtype} for name in names}
    yield dispatch_model(
        model, device_map={"": "disk"}, main_device="cpu", offload_index=index, offload_buffers=False, force_hooks=True
    )


@contextlib.contextmanager
def _transformers(model: nn.Module, path: Path, _: int) -> Iterator[nn.Module]:
    """Every weight on disk, in the file itself, as ``device_map`` of the library does it; its class has the model."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        yield type(model).from_pretrained(  # type: ignore[attr-defined]
            path.parent, dtype=_dtype_of(model), device_map={"": "disk"}, offload_folder=folder, use_cache=False
        )


def _split_for_airllm(path: Path) -> None:
    """Let AirLLM write its copy of the checkpoint, a file for each layer, and a tokenizer, which it asks for."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words)).save_pretrained(path.parent)
    program = f"import airllm; airllm.AutoModel.from_pretrained({str(path.parent)!r}, device='cpu')"
    subprocess.run([sys.executable, "-c", program], check=True)


@contextlib.contextmanager
def _airllm(model: nn.Module, path: Path, _: int) -> Iterator[nn.Module]:
    import airllm

    yield airllm.AutoModel.from_pretrained(str(path.parent), device="cpu", dtype=_dtype_of(model))


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def same_dtype_only(method: str) -> bool:
    """Return whether a method needs the dtype of the file: what maps it holds no cast weights."""
    return METHODS[method] in {_mapped, _torch_mapped}


METHODS: dict[str, Attach] = {
    "sluice": _streamed,
    "sluice, place=map": _mapped,
    "mmap": _torch_mapped,
    "accelerate": _accelerate,
    "transformers": _transformers,
    "airllm": _airllm,
    "loaded": _loaded,
}


#: Methods that do not train: the hooks of accelerate free weights that the backward pass needs.
INFERENCE_ONLY = frozenset({"accelerate", "transformers", "airllm"})


#: Preparations of methods, without a limit, before they are measured.
PREPARATIONS: dict[str, Callable[[Path], None]] = {"airllm": _split_for_airllm}


def fetched_bytes() -> int:
    """Return the bytes that this process has fetched from disks."""
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def work(
    method: str, path: str, size: str, dtype: str, batch: int, tokens: int, calls: int, memory: int, *, train: bool
) -> Work:
    """Attach a file to a model and call or train it. Returns seconds and bytes read of each call, and a hash."""
    yield
    model = _empty(size, getattr(torch, dtype)).requires_grad_(not train)
    yield
    found = []
    with METHODS[method](model, Path(path), memory) as running, torch.inference_mode(mode=not train):
        optimizer = torch.optim.AdamW(_adapters(running), lr=1e-3) if train else None
        for number in range(calls):
            # Other tokens in each call, for which a router chooses other experts.
            ids = (torch.arange(batch * tokens) + 977 * number).reshape(batch, tokens) % 50_000
            before, begin = fetched_bytes(), time.perf_counter()
            output = running(ids)
            result = getattr(output, "logits", output)
            if optimizer is not None:
                result = result.float().logsumexp(-1).mean()
                result.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append({"seconds": time.perf_counter() - begin, "read": fetched_bytes() - before})
        digest = hashlib.sha256(result.detach().float().contiguous().numpy().tobytes()).hexdigest()
    yield
    return {"calls": found, "logits": digest}


class _Adapted(nn.Module):
    """A layer and an adapter of rank 8, as LoRA."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(layer.in_features, 8, bias=False), nn.Linear(8, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.up(self.down(x.to(self.down.weight.dtype)))
        return self.layer(x) + added.to(x.dtype)  # type: ignore[no-any-return]


def _adapters(model: nn.Module) -> list[nn.Parameter]:
    """Give each linear layer inside of a block an adapter, and return their weights."""
    torch.manual_seed(0)
    for name, layer in list(model.named_modules()):
        around, _, own = name.rpartition(".")
        if type(layer) is nn.Linear and around:
            setattr(model.get_submodule(around), own, _Adapted(layer))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
