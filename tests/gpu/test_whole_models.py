"""Memory of loads to a simulated device, measured in a fresh process: host, allocated, reserved, and page-locked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.benchmark.gpt2 import random_state_dict, write_checkpoint
from support.fresh_process import run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_processes", "sim")]

MIB = 1 << 20

#: Loads a file onto the device and prints the memory; ``build()`` makes the model on meta.
_LOAD = """
import json, sys, torch, sluice
import sluice.machine.processes
from torch import nn
from support.simulated_device import plugged_in
from sluice.benchmark.gpt2 import GPTModel, config

path, dtype = sys.argv[1], getattr(torch, sys.argv[2])

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
    with sluice.machine.processes.PeakMeter() as meter:
        report = sluice.load_into(model, path, device="sim", dtype=dtype)
    (memory,) = report.device_memory
    peaks = torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()
    page_locked = sim.page_locked_bytes()
    names = {id(t): t for t in (*model.parameters(), *model.buffers())}
    expected = sluice.load_state_dict(path)
    print(json.dumps({
        "final": sum(t.nbytes for t in names.values() if t.device.type == "sim"),
        "host": meter.peaks.total_bytes,
        "allocated": peaks[0],
        "reserved": peaks[1],
        "predicted": memory.predicted_bytes,
        "page_locked": page_locked,
        "faults": sim.take_faults(),
        "wrong": sum(
            not torch.equal(ours.cpu(), expected[name].to(ours.dtype)) for name, ours in model.state_dict().items()
        ),
    }))
"""


def measured(path: Path, dtype: str, model: str) -> dict[str, Any]:
    process = run(_LOAD, path, dtype, model)
    assert not process.returncode, process.stderr
    found: dict[str, Any] = json.loads(process.stdout)
    return found


def assert_bounds(found: dict[str, Any]) -> None:
    assert found["wrong"] == 0
    assert not found["faults"]
    assert found["host"] <= 150 * MIB
    assert found["final"] <= found["reserved"] <= found["final"] + 40 * MIB
    assert found["page_locked"][0] == 0
    assert 0 < found["page_locked"][1] <= 64 * MIB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.long) for size in ("small", "medium")])
def test_the_tutorials_models(tmp_path: Path, size: str, dtype: str) -> None:
    write_checkpoint(random_state_dict(size, torch.float32), tmp_path / "model.pth")
    found = measured(tmp_path / "model.pth", dtype, size)
    assert_bounds(found)
    assert found["reserved"] == found["predicted"]


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_odd_sizes(tmp_path: Path, dtype: str, count: int) -> None:
    shapes = [(1 + i * 7919 % 173, 1 + i * 104_729 % 211) for i in range(count)]
    large = [(1025 + i, 1031) for i in range(6)]
    torch.save({f"t{i}": torch.full(shape, i % 251 + 0.5) for i, shape in enumerate((*shapes, *large))}, tmp_path / "f")
    found = measured(tmp_path / "f", dtype, "odd")
    assert_bounds(found)
    assert found["reserved"] == pytest.approx(found["predicted"], abs=2 * MIB)
