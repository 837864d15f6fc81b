"""Torch zip files: time and memory of an index."""

from __future__ import annotations

import statistics
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


TIMES = """
import sys, time
path = sys.argv[2]
if sys.argv[1] == "torch":
    import torch
    start = time.process_time()
    torch.load(path, map_location="meta", weights_only=True)
else:
    from sluice._options import Limits
    from sluice.formats.torch_save.zip_format import TorchZipFormat
    from sluice.sources.local import LocalFile
    start = time.process_time()
    TorchZipFormat().read_index(LocalFile(path), Limits())
print(time.process_time() - start)
"""


@pytest.mark.long
def test_indexing_takes_a_third_of_the_time_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "many.pth"
    torch.save({f"layers.{number}.weight": torch.ones(1 + number % 10) for number in range(100_000)}, path)
    seconds: dict[str, list[float]] = {"sluice": [], "torch": []}
    for _ in range(3):
        for who, found in seconds.items():
            command = [sys.executable, "-c", TIMES, who, str(path)]
            found.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert statistics.median(seconds["sluice"]) <= statistics.median(seconds["torch"]) / 3
