"""``python -m bench.stream``: ratios, and the command on the smallest model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import stream
from sluice.measuring import memory_limit_refusal


def test_a_ratio_is_to_the_longer_of_reading_and_computing() -> None:
    rows: list[dict[str, Any]] = [
        {"method": "a", "seconds": 2.0, "read": 4e9},
        {"method": "b", "seconds": 2.0, "read": 0},
        {"method": "c", "failed": "killed"},
    ]
    found = list(stream.ratios(rows, compute_seconds=0.5, bytes_per_second=2e9))
    assert [row.get("ratio") for row in found] == [1.0, 4.0, None]


@pytest.mark.long
def test_the_command_on_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := memory_limit_refusal():
        pytest.skip(reason)
    root = Path(str(stream.__file__)).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]))
    options = ["--size", "small", "--shares", "50", "--rounds", "1", "--directory", str(tmp_path)]
    done = CliRunner().invoke(stream.main, options)
    assert done.exit_code == 0, done.output
    assert all(line.endswith("yes") for line in done.output.splitlines()[2:]), done.output
