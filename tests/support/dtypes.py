"""dtypes of the installed torch; ``float8_e8m0fnu`` came with torch 2.7 and ``float4_e2m1fn_x2`` with torch 2.8."""

from __future__ import annotations

import pytest
import torch

from sluice._dtypes import ITEM_BYTES

#: Names of the dtypes that sluice reads and that the installed torch has.
TORCH_DTYPES = [name for name in ITEM_BYTES if hasattr(torch, name)]

needs_float4 = pytest.mark.skipif("float4_e2m1fn_x2" not in TORCH_DTYPES, reason="this torch has no float4_e2m1fn_x2")
