"""The comparison of loads by ranks: one cell with real processes, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.ranks import Cell, main, section


@pytest.mark.long
def test_every_method_finishes_with_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    command = ["--size", "tiny", "--ranks", "2", "--runs", "1", "--file", "shards", "--dtype", "float32"]
    done = CliRunner().invoke(main, [*command, "--directory", str(tmp_path / "files"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    cells = json.loads((tmp_path / "out" / "ranks.json").read_text())["cells"]
    assert {cell["method"] for cell in cells} == {"sluice", "set_model_state_dict", "accelerate", "torch DCP"}
    assert [cell["problem"] for cell in cells] == [""] * len(cells)
    assert all(len(cell["growth"]) == 2 for cell in cells)


def test_a_cell_without_a_result_says_why() -> None:
    cell = Cell(method="sluice", file="pth", ranks=2, dtype="float32", cold=True, problem="killed")
    assert section([cell]).rows == (("sluice", "pth", "float32", "2", "cold", *("-",) * 5, "killed"),)
