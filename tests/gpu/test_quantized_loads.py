"""Loads that quantize on the device: the bits of a model that was loaded there and quantized then."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice.quantizing.inner_tensors import inner_tensors
from support.quantized import scale_modules
from support.trained_net import empty

pytestmark = pytest.mark.gpu

MIB = 1 << 20


class Net(nn.Module):
    """Weights of 12 and 8 MiB that are quantized, and others that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(512, 1024)
        self.wide = nn.ModuleList(nn.Linear(1024, 3072) for _ in range(4))
        self.narrow = nn.ModuleList(nn.Linear(2048, 1024, bias=False) for _ in range(4))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("quantized") / "net.pth"
    torch.save(Net().state_dict(), path)
    return path


def _to_half(root: nn.Module) -> None:
    """Quantize whole weights by their largest number, so that rows apart would differ."""
    for module in root.modules():
        if isinstance(module, nn.Linear):
            values = module.weight / module.weight.abs().max()
            module.weight = nn.Parameter(values.to(torch.float16), requires_grad=False)


def _torchao(root: nn.Module) -> None:
    quantization: Any = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(root, quantization.Int8WeightOnlyConfig())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantize", [scale_modules(), _to_half, _torchao], ids=["rows", "whole", "torchao"])
def test_the_bits_and_the_memory(device: str, checkpoint: Path, quantize: Callable[[nn.Module], object]) -> None:
    module = torch.get_device_module()
    loaded = empty(Net)
    sluice.load_into(loaded, checkpoint, device=device)
    quantize(loaded)
    expected = _parts(loaded)
    del loaded
    gc.collect()  # torchao leaves cycles
    module.empty_cache()
    module.reset_peak_memory_stats()
    before, found = module.memory_reserved(), empty(Net)
    report = sluice.load_into(found, checkpoint, device=device, quantize=quantize)
    grown = module.max_memory_reserved() - before
    parts = _parts(found)
    final = sum(tensor.nbytes for _, tensors in parts for tensor in tensors)
    (memory,) = report.device_memory
    assert final < grown <= memory.predicted_bytes
    assert report.final_bytes == final
    for (kind, mine), (other, theirs) in zip(parts, expected, strict=True):
        assert kind == other
        assert all(map(torch.equal, mine, theirs))
    assert all(parameter.device == torch.device(device) for parameter in found.parameters())


def _parts(model: nn.Module) -> list[tuple[object, list[torch.Tensor]]]:
    """Return the form of each parameter, and its plain tensors on the host."""
    return [
        ((name, type(one), one.dtype, one.requires_grad), [inner.cpu() for inner in inner_tensors(one)])
        for name, one in model.named_parameters()
    ]
