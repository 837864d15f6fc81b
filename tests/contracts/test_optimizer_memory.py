"""The memory contract of optimizers, in fresh processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support import fresh_process

pytestmark = pytest.mark.usefixtures("fresh_processes")

MIB = 1 << 20
COUNT, SHAPE = 8, (2048, 1024)

RESUME = """
import json, sys, torch, sluice
from sluice.testing import assert_peak

path, dtype, device, whole, limit, count, shape = json.loads(sys.argv[1])
load_into, load_optimizer = sluice.load_into, sluice.load_optimizer  # imports what they need
parameter = torch.zeros(2, requires_grad=True, dtype=getattr(torch, dtype))
torch.optim.AdamW([parameter]).load_state_dict(torch.optim.AdamW([parameter]).state_dict())  # torch's own lazy parts
with torch.device("meta"):
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(shape)) for _ in range(count))
memory = sluice.MemoryLimits(staging="16MiB")
if not whole and device is None:
    model = torch.nn.ParameterList(torch.empty(shape, dtype=getattr(torch, dtype)) for _ in range(count))
with assert_peak(limit) as meter:
    with sluice.open(path) as checkpoint:
        if whole:
            load_into(model, checkpoint, memory=memory)
        optimizer = torch.optim.AdamW(model.parameters())
        report = load_optimizer(optimizer, checkpoint, device=device, memory=memory)
assert len(optimizer.state) == count
print(json.dumps([meter.peaks.total_bytes, report.predicted.total_bytes, report.measured.total_bytes]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.pt"
    weight = torch.full(SHAPE, 0.5)
    names = [str(number) for number in range(COUNT)]
    state = {
        number: {"step": torch.tensor(3.0), "exp_avg": weight.clone(), "exp_avg_sq": weight.clone()}
        for number in range(COUNT)
    }
    groups = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1)) for _ in names]).state_dict()["param_groups"]
    model = {name: weight.clone() for name in names}
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, path)
    return path


@pytest.mark.parametrize(
    ("dtype", "device", "whole"),
    [
        pytest.param("float32", "cpu", False, id="state alone", marks=pytest.mark.long),
        pytest.param("float32", None, True, id="model and state"),
        pytest.param("bfloat16", None, False, id="cast"),
    ],
)
def test_growth_is_the_finished_state_and_staging(run: Path, dtype: str, device: str | None, whole: bool) -> None:
    one = SHAPE[0] * SHAPE[1] * (2 if dtype == "bfloat16" else 4)
    tensors = COUNT * (3 if whole else 2)
    final = tensors * one
    contract = final + 16 * MIB + (tensors + COUNT) * 2048 + tensors * 8192 + 32 * MIB
    arguments = json.dumps([str(run), dtype, device, whole, contract, COUNT, SHAPE])
    done = fresh_process.run(RESUME, arguments)
    assert done.returncode == 0, done.stderr
    grown, predicted, measured = json.loads(done.stdout)
    assert grown >= 0.99 * final
    state = 2 * COUNT * one
    assert abs(predicted - state) <= 64 * MIB
    assert abs(measured - predicted) <= 48 * MIB
