"""Products, constants and casts of rules on accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice._dtypes import dtype_name
from sluice.entries.assembly import compute, pad, permute
from support.fake_accelerator import FakeAccelerator
from support.plans import MIB, entry_of, load, request


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
