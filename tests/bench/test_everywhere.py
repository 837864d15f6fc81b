"""``bench.everywhere`` compares and leaves nothing, at places without a mount; the puzzle of issue 75242 on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import _puzzle as puzzle
from bench import everywhere, places
from bench._common import run_alone
from bench._pattern import FILES, Pattern, write_files, wrong_tensors
from bench._puzzle import FULL, Puzzle, choose, make_file
from bench.everywhere import Row, section
from bench.places import Fill, Place, Spot, Unavailable
from sluice.benchmark.gpt2 import random_weight
from sluice.benchmark.records import Outcome

#: One block of the pattern.
SIZE = "1MiB"


@pytest.mark.long
def test_every_value_is_compared_and_nothing_stays(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    options = ["--place", "this disk", "--place", "tmpfs", "--size", SIZE, "--runs", "1"]
    options += ["--file", FILES[1], "--directory", str(folder), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "bench.everywhere", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr  # 1: slower than the goal, which a file this small does not show
    rows = json.loads((tmp_path / "out/everywhere.json").read_text())["rows"]
    assert [row["place"] for row in rows] == ["this disk", "tmpfs"]
    assert not rows[0]["skipped"]
    for row in rows:
        assert row["skipped"] or len(row["seconds"]["sluice"]) == 1 or "stays cached" in row["problems"]["sluice"]
    assert list(folder.iterdir()) == []


def test_one_wrong_bit_is_found(tmp_path: Path) -> None:
    write_files(tmp_path, 1)
    state = torch.load(tmp_path / FILES[1])
    model = Pattern(1)
    model.load_state_dict(state)
    assert wrong_tensors(model) == []
    model.blocks[0].get_parameter("zeros").data.view(torch.int32)[-1, -1] = 1
    assert wrong_tensors(model) == ["blocks.0.zeros"]


def test_the_ratio_is_to_the_fastest_raw_read_and_decides() -> None:
    seconds = {"direct": [9.0, 1.0, 1.0], "buffered": [2.0], "sluice": [1.1, 1.2, 1.1]}
    good = Row(place="ext4", file="pattern.pth", seconds=seconds)
    slow = Row(place="XFS", file="pattern.pth", seconds={**seconds, "sluice": [1.2]})
    wrong = Row(place="XFS", file="pattern.pth", seconds=seconds, problems={"sluice": "wrong values in 1 tensors"})
    skipped = Row(place="btrfs", skipped="mkfs.btrfs is not installed")
    assert [row.failed for row in (good, slow, wrong, skipped)] == [False, True, True, False]
    rows = section([good, slow, wrong, skipped]).rows
    assert rows[0] == ("ext4", ".pth", "1.00", "2.00", "-", "1.10", "1.10", "")
    assert [row[-1] for row in rows[1:]] == [
        *("above the goal", "sluice: wrong values in 1 tensors", "skipped: mkfs.btrfs is not installed")
    ]
    assert rows[1][-2] == "1.20"


def test_a_place_that_cannot_be_set_up_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def refuse(work: Path, fill: Fill, nbytes: int) -> Iterator[Spot]:
        (work / "left").touch()
        raise Unavailable("mounting needs root")
        yield

    monkeypatch.setitem(places.PLACES, "refused", Place(set_up=refuse))
    rows = everywhere._rows("refused", 1, 1, FILES, tmp_path)
    assert rows == [Row(place="refused", skipped="mounting needs root")]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Unavailable, match=r"mkfs\.absent is not installed"):
        places._run("mkfs.absent")


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


def _solve(path: Path) -> Outcome:
    return run_alone("bench._puzzle:solve", {"path": str(path), "layers": 3, "width": 64, "device": "cpu"})


@pytest.mark.usefixtures("forked_processes")
def test_it_is_solved_in_a_process_of_its_own(small_file: Path, tmp_path: Path) -> None:
    found = _solve(small_file)
    assert (found.status, found.reason) == ("ok", "")
    assert (found.facts["wrong_matrices"], found.facts["computes"]) == (0, True)
    assert found.facts["read_bytes"] >= SMALL.file_bytes
    assert found.seconds > 0
    assert "nowhere" in _solve(tmp_path / "nowhere").reason


@pytest.mark.usefixtures("forked_processes")
def test_wrong_matrices_are_counted(small_file: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt.pth"
    content = bytearray(small_file.read_bytes())
    offset = puzzle._storage_offsets(small_file)[1]
    content[offset : offset + 4] = b"\x00\x00\x80\x3f"
    spoilt.write_bytes(content)
    assert _solve(spoilt).facts["wrong_matrices"] == 1
