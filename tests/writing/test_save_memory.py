"""A save takes its buffer and little more, also with a cast; each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys, torch, sluice
from sluice.testing import assert_peak
path, kind = sys.argv[1:]
state = {f"w{i}": torch.randn(1024, 4096) for i in range(12)}  # 192 MiB
state["transposed"] = torch.randn(4096, 1024).t()
dtype = torch.bfloat16 if kind == "cast" else None
sluice.save({"w": torch.ones(9, 9).t()}, path + ".warm.pt", dtype=torch.float16)  # imports
with assert_peak((16 + 32) << 20):
    sluice.save(state, path, dtype=dtype)
"""


@pytest.mark.parametrize("kind", ["same", "cast"])
@pytest.mark.parametrize("name", ["f.pt", "f.safetensors"])
def test_a_save_stays_within_its_buffer(tmp_path: Path, name: str, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / name), kind], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
