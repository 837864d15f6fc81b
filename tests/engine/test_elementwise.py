"""Casts and arithmetic of elements."""

from __future__ import annotations

import torch

from sluice.engine.elementwise import cast, computed, element_function
from sluice.records import Elements
from support.oracles import bits


def test_casts_and_arithmetic() -> None:
    rows = torch.randn(4, 5)
    assert element_function(Elements(dtype="float32")) is cast
    target = torch.empty(4, 5, dtype=torch.bfloat16)
    cast(target, rows)
    assert bits(target) == bits(rows.bfloat16())
    element_function(Elements(dtype="float32", arithmetic=(("mul", 0.5), ("add", 3.0))))(target, rows)
    assert bits(target) == bits((rows * 0.5 + 3.0).bfloat16())
    computed(())(target, rows)
    assert bits(target) == bits(rows.bfloat16())
