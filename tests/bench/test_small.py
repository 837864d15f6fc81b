"""``python -m bench.small``: when a goal counts as reached, and the command at a tiny size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from bench.small import Row, main


def test_when_a_goal_is_kept() -> None:
    row = Row(what="a file", megabytes=1.0, ours=(1.2, 1.1), others={"one": 1.0, "other": 2.0})
    assert row.kept
    assert not replace(row, ours=(1.3, 0.5)).kept
    assert not replace(row, ours=(0.5, 1.3)).kept
    assert not replace(row, megabytes=50.0).kept
    assert replace(row, megabytes=50.0, ours=(0.9, 0.8)).kept


@pytest.mark.long
def test_the_command_at_a_tiny_size() -> None:
    done = CliRunner().invoke(main, ["--runs", "2", "--clock", "processor", "--size", "20", "0.01"])
    assert done.exit_code in {0, 1}, done.output  # one run of a tiny file says nothing about the goal
    for what in ("20 tensors, 0.01 MB, .pth", "20 tensors, 0.01 MB, .safetensors"):
        assert what in done.output
