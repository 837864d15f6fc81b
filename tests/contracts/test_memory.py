"""The memory contract, in fresh processes: memory that a test process freed before would hide the growth of a load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from support import fresh_process
from support.distributed import chunks, write

pytestmark = pytest.mark.usefixtures("fresh_processes")

MIB = 1 << 20

LOAD = """
import json, sys, torch, sluice
from sluice.testing import assert_peak

path, shapes, options, limit = json.loads(sys.argv[1])
with torch.device("meta"):
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(shape)) for shape in shapes])
options["memory"] = sluice.MemoryLimits(staging=options["memory"])
if "dtype" in options:
    options["dtype"] = getattr(torch, options["dtype"])
load_into = sluice.load_into  # imports what it needs: time and memory count from the call on
with assert_peak(limit) as meter:
    report = load_into(model, path, **options)
print(json.dumps([meter.peaks.total_bytes, report.predicted.total_bytes, report.measured.total_bytes, report.reads]))
"""


def load(path: Path, shapes: list[tuple[int, ...]], limit: int, **options: Any) -> tuple[int, int, int, dict[str, int]]:
    """Load a list of parameters in a fresh process that fails above ``limit`` bytes of growth."""
    arguments = json.dumps([str(path), shapes, options, limit])
    done = fresh_process.run(LOAD, arguments)
    assert done.returncode == 0, done.stderr
    measured: tuple[int, int, int, dict[str, int]] = tuple(json.loads(done.stdout))
    return measured


@pytest.fixture(scope="module")
def shapes() -> list[tuple[int, ...]]:
    return [(2048, 2048), (2048,)] * 12


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]]) -> Path:
    path = tmp_path_factory.mktemp("contract") / "f.pth"
    torch.save({str(i): torch.full(shape, 0.25) for i, shape in enumerate(shapes)}, path)
    return path


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"page_cache": "bypass"}, {"dtype": "bfloat16", "page_cache": "bypass"}],
    ids=str,
)
def test_growth_stays_within_final_size_staging_and_a_constant(
    file: Path, shapes: list[tuple[int, ...]], options: dict[str, str]
) -> None:
    final = 12 * (2048 * 2048 + 2048) * (2 if "dtype" in options else 4)
    contract = final + 16 * MIB + 24 * 2048 + 12 * 8192 + 32 * MIB
    grown, predicted, measured, reads = load(file, shapes, contract, memory="16MiB", **options)
    assert grown >= 0.99 * final
    assert abs(predicted - grown) <= 32 * MIB
    assert abs(measured - grown) <= 4 * MIB
    if options.get("page_cache") == "bypass" and reads["direct"] == 0:
        pytest.skip("the file system of the temporary directory refuses direct reads")


def test_one_tensor_larger_than_staging(tmp_path: Path) -> None:
    tensor = torch.zeros(8192, 6144)
    torch.save({"0": tensor}, tmp_path / "f.pth")
    final = tensor.nbytes // 2
    load(tmp_path / "f.pth", [(8192, 6144)], final + MIB + 2048 + 8192 + 32 * MIB, memory="1MiB", dtype="bfloat16")


ROWS = [((first, 0), (512, 2048)) for first in range(0, 2048, 512)]
GRID = [((row, column), (1024, 1024)) for row in (0, 1024) for column in (0, 1024)]


@pytest.mark.parametrize("boxes", [pytest.param(ROWS, marks=pytest.mark.long), GRID], ids=["rows", "grid"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_chunks_of_a_distributed_checkpoint(
    tmp_path: Path, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], dtype: str | None
) -> None:
    """Elements at odd addresses are copied in small pieces: copying whole buffers took 16 MiB per reader."""
    write(tmp_path / "d", {str(i): chunks(torch.full((2048, 2048), 0.25), boxes, files=2) for i in range(4)})
    with sluice.open(tmp_path / "d") as checkpoint:
        assert any(offset % 4 for offset in checkpoint.locate(range(16)).values())
    final = 4 * 2048 * 2048 * (2 if dtype else 4)
    options = {"dtype": dtype} if dtype else {}
    # Half of what the contract allows besides staging, so that such a buffer would exceed it.
    load(tmp_path / "d", [(2048, 2048)] * 4, final + (16 + 16) * MIB, memory="16MiB", **options)
