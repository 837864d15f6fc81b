"""Casts and arithmetic of elements."""

from __future__ import annotations

import torch

from sluice.engine.elementwise import compute
from support.oracles import bits


def test_casts_and_arithmetic() -> None:
    rows = torch.randn(4, 5)
    target = torch.empty(4, 5, dtype=torch.bfloat16)
    compute(target, rows)
    assert bits(target) == bits(rows.bfloat16())
    compute(target, rows, (("mul", 0.5), ("add", 3.0)))
    assert bits(target) == bits((rows * 0.5 + 3.0).bfloat16())
