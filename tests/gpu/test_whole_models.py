"""Memory of loads to a simulated device, measured in a fresh process: host, allocated, reserved, and page-locked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice.benchmark.gpt2 import random_state_dict, write_checkpoint
from support.fresh_process import run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_processes", "sim")]

MIB = 1 << 20

#: Loads a file onto the device and checks the memory; ``build()`` makes the model on meta.
_LOAD = """
import sys, torch, sluice
from torch import nn
from support.simulated_device import plugged_in
from sluice.benchmark.gpt2 import GPTModel, config
from sluice.testing import assert_peak

MIB = 1 << 20
path, dtype, tolerance = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[4])

def build():
    if sys.argv[3] != "odd":
        return GPTModel(config(sys.argv[3]))
    with sluice.open(path) as checkpoint:
        shapes = {name: tensor.shape for name, tensor in checkpoint.items()}
    return nn.ParameterDict({name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()})

with plugged_in() as sim:
    torch.ones(3, device="sim").to(torch.bfloat16).cpu()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    with sluice.empty_init():
        model = build()
    with assert_peak(150 * MIB):
        report = sluice.load_into(model, path, device="sim", dtype=dtype)
    (memory,) = report.device_memory
    reserved, page_locked = torch.accelerator.max_memory_reserved(), sim.page_locked_bytes()
    names = {id(t): t for t in (*model.parameters(), *model.buffers())}
    final = sum(t.nbytes for t in names.values() if t.device.type == "sim")
    assert final <= reserved <= final + 40 * MIB, (final, reserved)
    assert abs(reserved - memory.predicted_bytes) <= tolerance, (reserved, memory)
    assert page_locked[0] == 0 < page_locked[1] <= 64 * MIB, page_locked
    assert not sim.take_faults()
    expected = sluice.load_state_dict(path)
    for name, ours in model.state_dict().items():
        assert torch.equal(ours.cpu(), expected[name].to(ours.dtype)), name
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.long) for size in ("small", "medium")])
def test_the_tutorials_models(tmp_path: Path, size: str, dtype: str) -> None:
    write_checkpoint(random_state_dict(size, torch.float32), tmp_path / "model.pth")
    done = run(_LOAD, tmp_path / "model.pth", dtype, size, 0)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_odd_sizes(tmp_path: Path, dtype: str, count: int) -> None:
    shapes = [(1 + i * 7919 % 173, 1 + i * 104_729 % 211) for i in range(count)]
    large = [(1025 + i, 1031) for i in range(6)]
    torch.save({f"t{i}": torch.full(shape, i % 251 + 0.5) for i, shape in enumerate((*shapes, *large))}, tmp_path / "f")
    done = run(_LOAD, tmp_path / "f", dtype, "odd", 2 * MIB)
    assert not done.returncode, done.stderr
