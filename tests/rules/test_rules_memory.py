"""Rules keep the memory contract, in fresh processes, read each byte once, and compute on accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice._dtypes import dtype_name
from sluice.entries.assembly import compute, pad, permute
from support import fresh_process
from support.fake_accelerator import FakeAccelerator
from support.plans import MIB, entry_of, load, request

WIDTH, BLOCKS, ROWS = 1536, 4, 6000

#: Splits fused, transposed weights and grows a vocabulary, into separate bfloat16 parameters.
LOAD = """
import sys, torch, sluice
from sluice import rules
from sluice.testing import assert_peak
from support import fresh_process

path, width, blocks, rows, limit = sys.argv[1], *map(int, sys.argv[2:])
names = [f"{i}_{part}" for i in range(blocks) for part in "qkv"]
with torch.device("meta"):
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.empty(width, width)) for name in names})
    model["vocabulary"] = torch.nn.Parameter(torch.empty(rows + 100, width))
applied = [
    rules.transpose("h.*.c_attn.weight"),
    rules.split("h.*.c_attn.weight", ("*_q", "*_k", "*_v")),
    rules.scale("*_q", 0.125),
    rules.resize("vocabulary", rows + 100),
]
load_into = sluice.load_into
with assert_peak(limit) as meter:
    report = load_into(model, path, dtype=torch.bfloat16, rules=applied, memory=sluice.MemoryLimits(staging="16MiB"))
for i in range(blocks):
    for value, part in enumerate("qkv", 1):
        expected = value * 0.125 if part == "q" else value
        assert bool((model[f"{i}_{part}"] == expected).all()), (i, part)
assert bool((model["vocabulary"][:rows] == 7).all()) and not bool(model["vocabulary"][rows:].any())
print(meter.peaks.total_bytes, report.read_bytes)
"""


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fused") / "f.pth"
    weight = torch.arange(1.0, 4.0).repeat_interleave(WIDTH).expand(WIDTH, -1)
    tensors = {f"h.{i}.c_attn.weight": weight.contiguous() for i in range(BLOCKS)}
    torch.save({**tensors, "vocabulary": torch.full((ROWS, WIDTH), 7.0)}, path)
    return path


@pytest.mark.usefixtures("fresh_processes")
def test_a_fused_split_with_a_cast_stays_within_the_contract_and_reads_once(fused: Path) -> None:
    tensors = 3 * BLOCKS + 1
    final = 2 * WIDTH * (3 * BLOCKS * WIDTH + ROWS + 100)
    contract = final + 16 * MIB + tensors * (2048 + 8192) + 32 * MIB
    arguments = (fused, WIDTH, BLOCKS, ROWS, contract)
    done = fresh_process.run(LOAD, *arguments)
    assert done.returncode == 0, done.stderr
    grown, read = map(int, done.stdout.split())
    assert grown >= 0.99 * final
    assert read <= 1.01 * fused.stat().st_size


@pytest.mark.parametrize("cores", [2, 16])  # with many, the host casts to narrower dtypes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_constants_arrive(tmp_path: Path, dtype: torch.dtype, cores: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(700, 500), torch.randn(3, 4), torch.randn(MIB), torch.empty(0, 2)]
    entries = [entry_of(tensor, i) for i, tensor in enumerate(tensors)]
    wanted = [
        permute(compute(entries[0], "mul", 0.1), (1, 0)),
        compute(pad(entries[1], 0, 5, 0.3), "add", 3.3),
        compute(compute(entries[2], "mul", 1.7), "add", -0.3),
        pad(entries[3], 0, 4, 2.5),
    ]
    requests = [
        request(f"t{i}", entry, device="fake:0", dtype=dtype_name(dtype), stride=None) for i, entry in enumerate(wanted)
    ]
    loaded = load(tmp_path / "f", tensors, requests, shift=2, fake=FakeAccelerator(), cores=cores)
    expected = [
        (tensors[0] * 0.1).t(),
        torch.cat([tensors[1], torch.full((2, 4), 0.3)]) + 3.3,
        tensors[2] * 1.7 - 0.3,
        torch.full((4, 2), 2.5),
    ]
    for ours, theirs in zip(loaded, expected, strict=True):
        assert torch.equal(ours, theirs.to(dtype))
