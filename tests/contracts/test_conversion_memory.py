"""A conversion takes its buffers and little more for files of any size; each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import fresh_process

pytestmark = pytest.mark.usefixtures("fresh_processes")

CODE = """
import sys, torch, sluice
from sluice.testing import assert_peak
source, destination, kind, tensors = sys.argv[1:]
dtype = torch.bfloat16 if kind == "cast" else None
how = dict(memory=sluice.MemoryLimits(staging="16MiB"), dtype=dtype)
if kind == "turned":
    how["rules"] = [sluice.rules.transpose("*")]
torch.save({"w": torch.ones(9, 9).t()}, destination + ".warm.pt")  # imports and the first touch of everything
sluice.convert(destination + ".warm.pt", destination + ".warm.safetensors", dtype=torch.float16)
sluice.convert(destination + ".warm.pt", destination + ".warm2.pt", dtype=torch.float16)
with assert_peak((16 + 32 << 20) + 1024 * int(tensors)):
    report = sluice.convert(source, destination, **how)
assert report.tensors == int(tensors), report.tensors
"""

#: Several times the bound: 16 tensors of 16 MiB, each larger than the half of staging that batches tensors.
LARGE = """
import sys, torch
torch.save({f"w{i}": torch.full((2048, 2048), float(i)) for i in range(16)}, sys.argv[1])
"""

MANY = """
import sys, torch
torch.save({f"layer.{i}.weight": torch.full((3,), float(i)) for i in range(int(sys.argv[2]))}, sys.argv[1])
"""


def run(code: str, *arguments: object) -> None:
    done = fresh_process.run(code, *arguments)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "in.pt"
    run(LARGE, path)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("out.pt", "cast"),
        ("out.safetensors", "same"),
        ("out.safetensors", "turned"),
        pytest.param("out.pt", "same", marks=pytest.mark.long),
        pytest.param("out.pt", "turned", marks=pytest.mark.long),
        pytest.param("out.safetensors", "cast", marks=pytest.mark.long),
        pytest.param("model", "cast", marks=pytest.mark.long),
    ],
)
def test_a_large_file_takes_no_more_than_the_buffers(tmp_path: Path, large: Path, name: str, kind: str) -> None:
    run(CODE, large, tmp_path / name, kind, 16)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("out.pt", 10_000),
        pytest.param("out.pt", 100_000, marks=pytest.mark.long),
        pytest.param("out.safetensors", 100_000, marks=pytest.mark.long),
    ],
)
def test_many_tensors_take_a_kilobyte_each(tmp_path: Path, name: str, count: int) -> None:
    run(MANY, tmp_path / "in.pt", count)
    run(CODE, tmp_path / "in.pt", tmp_path / name, "same", count)
