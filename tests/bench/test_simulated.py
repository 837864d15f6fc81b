"""``bench.simulated``: the tutorial's table and the puzzle on the simulated device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.simulated import PUBLISHED
from sluice.benchmark.strategies import STRATEGIES
from support.simulated_device import reason_against

ROOT = Path(__file__).parents[2]
REASON = reason_against()


def test_every_method_of_the_tutorial_has_published_figures() -> None:
    assert {*PUBLISHED, "sluice"} == {method.name for method in STRATEGIES}


@pytest.mark.long
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_sluice_keeps_its_bounds_and_solves_the_puzzle(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "bench.gpu", "--device", "sim", "--size", "tiny", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│ ")]
    tutorial = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if len(row) == 7}
    puzzle = {row[0].strip(): row[3].strip() for row in rows if len(row) == 4}
    assert {row[-1] for name, row in tutorial.items() if name != "method"} == {"yes"}
    assert float(tutorial["naive"][0]) >= 1.9
    assert float(tutorial["sluice"][0]) <= 1.05  # a block of the allocator may be up to 1 MiB larger than its tensor
    assert puzzle.pop("sluice") == "fits"
    assert set(puzzle.values()) == {"outcome", "the device is too small"}
    assert not list(tmp_path.iterdir())
