"""A save takes its buffer and little more, also with a cast; each in a fresh process."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import fresh_process

pytestmark = pytest.mark.usefixtures("fresh_processes")

CODE = """
import sys, torch, sluice
from sluice.testing import assert_peak
path, kind = sys.argv[1:]
if "many" in kind:
    state = {f"w{i}": torch.ones(1024, 4096) for i in range(12)}  # 192 MiB
    state["transposed"] = torch.ones(4096, 1024).t()
elif "strided" in kind:
    whole = torch.ones(4096, 12288)
    permuted = whole.view(64, 64, 12288).permute(2, 0, 1)
    state = {"turned": whole.t(), "every second": whole[::2, 1::2], "permuted": permuted}
    if path.endswith(".pt"):  # where views share what they need of a storage
        state = {"turned": whole.t(), "conjugate": torch.ones(1024, 12288, dtype=torch.complex64).conj()}
else:
    state = {"huge": torch.ones(12, 4096, 1024)}
dtype = torch.bfloat16 if "cast" in kind else None
sluice.save({"w": torch.ones(9, 9).t()}, path + ".warm.pt", dtype=torch.float16)  # imports
with assert_peak((16 + 32) << 20):
    sluice.save(state, path, dtype=dtype)
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("f.pt", "many"),
        ("f.pt", "huge, cast"),
        ("f.safetensors", "many, cast"),
        ("f.safetensors", "strided"),
        pytest.param("f.pt", "many, cast", marks=pytest.mark.long),
        pytest.param("f.pt", "strided, cast", marks=pytest.mark.long),
        pytest.param("f.pt", "huge", marks=pytest.mark.long),
        pytest.param("f.safetensors", "many", marks=pytest.mark.long),
        pytest.param("f.safetensors", "strided, cast", marks=pytest.mark.long),
        pytest.param("f.safetensors", "huge", marks=pytest.mark.long),
        pytest.param("f.safetensors", "huge, cast", marks=pytest.mark.long),
        pytest.param("directory", "strided", marks=pytest.mark.long),
        pytest.param("directory", "huge, cast", marks=pytest.mark.long),
    ],
)
def test_a_save_stays_within_its_buffer(tmp_path: Path, name: str, kind: str) -> None:
    done = fresh_process.run(CODE, tmp_path / name, kind)
    assert done.returncode == 0, done.stderr
