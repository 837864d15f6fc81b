"""dtypes of the installed torch; ``float8_e8m0fnu`` came with torch 2.7 and ``float4_e2m1fn_x2`` with torch 2.8."""

from __future__ import annotations

import pytest
import torch

from sluice._dtypes import ITEM_BYTES, torch_dtype

#: Names of the dtypes that sluice reads and that the installed torch has.
TORCH_DTYPES = [name for name in ITEM_BYTES if hasattr(torch, name)]

needs_float4 = pytest.mark.skipif("float4_e2m1fn_x2" not in TORCH_DTYPES, reason="this torch has no float4_e2m1fn_x2")


def any_bits(name: str, count: int) -> torch.Tensor:
    """Return a tensor of any dtype with arbitrary bits, NaN payloads included."""
    dtype: torch.dtype = torch_dtype(name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype)
