"""``python -m bench.everywhere`` loads, compares and leaves nothing, at the places that need no mount."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bench import everywhere, places
from bench._pattern import FILES, Pattern, write_files, wrong_tensors
from bench.everywhere import Row, section
from bench.places import Fill, Place, Spot, Unavailable

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


def test_a_missing_program_is_the_reason() -> None:
    with pytest.raises(Unavailable, match=r"mkfs\.absent is not installed"):
        places._run("mkfs.absent")
