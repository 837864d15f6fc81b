"""Torch zip files: time and memory of an index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

MEASURE = """
import sys
from sluice._options import Limits
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.sources.local import LocalFile

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

source = LocalFile(sys.argv[1])
before = peak()
index = TorchZipFormat().read_index(source, Limits())
assert not {"torch", "numpy"} & sys.modules.keys()
print(len(index.storages), peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_memory_of_a_large_index_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "many.pth"
    tensors = {
        f"model.layers.{number // 10}.block.{number % 10}.weight": torch.ones(1 + number % 10)
        for number in range(30_000)
    }
    torch.save(tensors, path)
    result = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True)
    count, grown_kib = map(int, result.stdout.split())
    assert count == 30_000
    assert grown_kib <= count * 1.0
