"""``python -m bench.convert`` measures every conversion and a copy of the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.convert import CASES, main, table
from sluice.benchmark.cache import make_cold


def test_every_case_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "probe").write_bytes(b"x" * 5000)
    if not make_cold(tmp_path / "probe"):
        pytest.skip("this file system keeps its files in memory")
    options = ["--size", "tiny", "--runs", "1", "--directory", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, options)
    assert done.exit_code == 0, done.output
    seconds = json.loads((tmp_path / "out" / "convert.json").read_text(encoding="utf-8"))["seconds"]
    assert seconds.keys() == {*CASES, "cp .pth", "cp .safetensors"}
    assert all(len(runs) == 1 for runs in seconds.values())
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["tiny.pth", "tiny.safetensors"]
    assert "| pth-pth |" in (tmp_path / "out" / "convert.md").read_text(encoding="utf-8")


def test_the_ratio_is_that_of_medians() -> None:
    cases = {"pth-pth": CASES["pth-pth"]}
    lines = table(cases, {"pth-pth": [1.0, 2.0, 9.0], "cp .pth": [3.0, 1.0, 100.0]})
    assert lines[2] == "| pth-pth | 2.00 | 3.00 | 1.50 | 1.00 to 9.00 |"
