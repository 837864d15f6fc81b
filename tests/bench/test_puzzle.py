"""The puzzle of pytorch issue 75242 at a small scale, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import _puzzle as puzzle
from bench._common import run_alone
from bench._puzzle import FULL, Puzzle, choose, make_file
from sluice.benchmark.gpt2 import random_weight
from sluice.benchmark.records import Outcome
from support import fresh_process

GIB = 1 << 30
SMALL = Puzzle(layers=3, width=64)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 1.0),
        ({"disk_bytes": 20 * 10**9}, 0.47),
        ({"device_bytes": 12 * GIB}, 0.47),
        ({"seconds": 100.0}, 0.5),
        ({"bytes_per_second": 0.25e9}, 0.33),
        ({"seconds": 30.0}, None),
        ({"disk_bytes": 10**9}, None),
    ],
)
def test_the_puzzle_is_as_large_as_disk_device_and_time_allow(changes: dict[str, Any], share: float | None) -> None:
    plenty: dict[str, Any] = {
        "disk_bytes": 10**12, "device_bytes": 10**12, "seconds": 200.0, "bytes_per_second": 1e9
    }  # fmt: skip
    chosen = choose(**{**plenty, **changes})
    assert (chosen and chosen.share) == (share and pytest.approx(share, abs=0.01))


def test_the_full_puzzle_is_that_of_the_issue() -> None:
    assert round(FULL.file_bytes / 1e9) == 40
    assert round(FULL.final_bytes / 1e9) == 20
    assert FULL.device_limit_bytes == 24 * GIB


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("puzzle") / "puzzle.pth"
    make_file(path, SMALL, threads=2)
    return path


def test_its_file_is_an_ordinary_one_that_torch_loads(small_file: Path) -> None:
    state_dict = torch.load(small_file, weights_only=True)
    assert list(state_dict) == ["0.weight", "2.weight", "4.weight"]
    for name, weight in state_dict.items():
        assert torch.equal(weight, random_weight(name, weight.shape)), name


@pytest.fixture
def _forked(fresh_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of this test from one that has imported torch."""
    monkeypatch.setattr("sluice.benchmark.process.subprocess", fresh_process.SUBPROCESS)


def _solve(path: Path) -> Outcome:
    return run_alone("bench._puzzle:solve", {"path": str(path), "layers": 3, "width": 64, "device": "cpu"})


@pytest.mark.usefixtures("_forked")
def test_it_is_solved_in_a_process_of_its_own(small_file: Path, tmp_path: Path) -> None:
    found = _solve(small_file)
    assert (found.status, found.reason) == ("ok", "")
    assert (found.facts["wrong_matrices"], found.facts["computes"]) == (0, True)
    assert found.facts["read_bytes"] >= SMALL.file_bytes
    assert found.seconds > 0
    assert "nowhere" in _solve(tmp_path / "nowhere").reason


@pytest.mark.usefixtures("_forked")
def test_wrong_matrices_are_counted(small_file: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt.pth"
    content = bytearray(small_file.read_bytes())
    offset = puzzle._storage_offsets(small_file)[1]
    content[offset : offset + 4] = b"\x00\x00\x80\x3f"
    spoilt.write_bytes(content)
    assert _solve(spoilt).facts["wrong_matrices"] == 1
