"""``python -m bench.cached``: when a goal counts as missed, and the command itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import cached


def _together(fetched: float) -> dict[str, object]:
    run = {"seconds": 1.0, "fetched": fetched}
    return {"processes": 4, "runs": {way: [run] for way in cached.WAYS}}


def test_a_goal_is_a_ratio_to_the_better_method_and_to_the_bytes_of_the_file() -> None:
    row = {"percent": 50, "layout": "scattered", "seconds": {"all direct": [1.0], "all buffered": [2.0]}}
    good = {**row, "seconds": {**row["seconds"], "sluice": [1.1]}}  # type: ignore[dict-item]
    bad = {**row, "seconds": {**row["seconds"], "sluice": [1.2]}}  # type: ignore[dict-item]
    assert cached.goals_missed([good], [_together(1.0)]) == []
    assert cached.goals_missed([bad], [_together(2.0)]) == [
        "50 % cached, scattered: 1.20 times the better method",
        "4 processes fetched 2.00 times the file",
    ]


@pytest.mark.long
def test_the_command_on_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(str(cached.__file__)).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]))
    options = [
        "--mib",
        "64",
        "--runs",
        "1",
        "--shares",
        "0,50",
        "--processes",
        "2",
        "--directory",
        str(tmp_path / "in"),
    ]
    done = CliRunner().invoke(cached.main, [*options, "--out", str(tmp_path / "out")])
    assert done.exit_code in {0, 1}, done.output  # the goals do not apply to this small file
    result = json.loads((tmp_path / "out" / "cached.json").read_text(encoding="utf-8"))
    assert [(row["percent"], row["layout"]) for row in result["shares"]] == [
        (0, "contiguous"),
        (50, "contiguous"),
        (50, "scattered"),
    ]
    assert list((tmp_path / "in").iterdir()) == []
